"""B05: the same talk in every layout gives the same ids and masks; what is unknown is named."""

import pytest

from tests.field_reports.talks_fixtures import (  # noqa: F401
    Talks,
    plain_target_fixture,
    talk,
    talks_fixture,
)

SYSTEM = "Be kind."
TURNS = [("user", "Hi"), ("assistant", "Hello."), ("user", "Bye"), ("assistant", "See you.")]


def turns(role: str, text: str, *, user: str = "user", gpt: str = "assistant", system: bool = True):
    names = {"user": user, "assistant": gpt, "system": "system"}
    said = [("system", SYSTEM), *TURNS] if system else TURNS
    return [{role: names[who], text: what} for who, what in said]


FIVE = {
    "conversations of human and gpt": {
        "conversations": turns("from", "value", user="human", gpt="gpt")
    },
    "conversations of user and assistant": {"conversations": turns("from", "value")},
    "messages": {"messages": turns("role", "content")},
    "role and content under conversations": {"conversations": turns("role", "content")},
    "system text in a field": {
        "system": SYSTEM,
        "conversations": turns("from", "value", user="human", gpt="gpt", system=False),
    },
}
ANSWERS = ["Hello.<|im_end|>", "See you.<|im_end|>"]
REST = [
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n",
    "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "\n",
]
OTHER = talk("A?", "Yes.")  # of which one sample of a run is held out


@pytest.mark.parametrize("name", FIVE)
def test_every_layout_gives_all_four_turns(talks: Talks, name):
    talks.kept([FIVE[name], OTHER])
    assert talks.islands()[0] == (ANSWERS, REST)


def test_all_five_layouts_give_the_same_ids_and_masks(talks: Talks):
    """Said by the product itself: four of them repeat the first."""
    counts = talks.kept([*FIVE.values(), OTHER], "--set", "prepare.least_kept_share=0.3")
    assert (counts["kept"], counts["skipped"]) == (2, {"duplicate": 4})
    assert [skip["place"] for skip in talks.skips()] == [
        f"talks.jsonl line {n}" for n in (2, 3, 4, 5)
    ]


NAMED = [
    (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "observation", "value": "5"},
            ]
        },
        "unknown_role",
        "conversations[1]: role 'observation', known: human, user, gpt, assistant, system, tool",
    ),
    (
        {**FIVE["messages"], "conversations": turns("from", "value", user="human", gpt="gpt")[:3]},
        "two_conversations",
        "messages and conversations are both there and differ",
    ),
]


def test_an_unknown_role_and_two_differing_columns_are_counted_and_named(talks: Talks):
    counts = talks.kept([FIVE["messages"], OTHER, *(record for record, _, _ in NAMED)])
    assert (counts["read"], counts["kept"]) == (4, 2)
    assert counts["skipped"] == {"unknown_role": 1, "two_conversations": 1}
    assert [(one["place"], one["reason"], one["detail"]) for one in talks.skips()] == [
        (f"talks.jsonl line {line}", reason, detail)
        for line, (_, reason, detail) in enumerate(NAMED, start=3)
    ]


def test_only_such_records_end_with_an_error_that_names_role_and_column(talks: Talks):
    error = talks.refused(talks.write([record for record, _, _ in NAMED]))
    assert "role 'observation'" in error
    assert "messages and conversations" in error
