"""B03: one bad record stops nothing, is counted by its reason, and is named in strict mode."""

import json

import pytest

from tests.field_reports.talks_fixtures import (  # noqa: F401
    Talks,
    plain_target_fixture,
    talk,
    talks_fixture,
)

GOOD = talk("What is the sky?", "It is blue.")
USER, OTHER = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And you?"}
SAID, MORE = {"role": "assistant", "content": "Hello."}, {"role": "assistant", "content": "Well."}
NINE = [
    {"messages": []},
    {"messages": [{"role": "system", "content": "Be kind."}]},
    {"messages": [SAID, USER, MORE]},
    {"messages": [USER, OTHER, SAID]},
    {"messages": [USER, SAID, MORE]},
    {"messages": [USER, MORE, OTHER]},
    {"messages": [USER, {"role": "assistant", "content": ""}]},
    {"messages": [USER, {"role": "assistant", "content": None}]},
    GOOD,
]


def test_each_of_nine_is_kept_with_the_right_mask_or_skipped_by_its_rule(talks: Talks):
    counts = talks.kept(NINE, "--set", "prepare.least_kept_share=0.4")
    assert (counts["read"], counts["kept"]) == (9, 4)
    assert counts["skipped"] == {
        "no_messages": 1,
        "no_assistant_turn": 1,
        "assistant_first": 1,
        "empty_answer": 1,
        "null_content": 1,
    }
    assert [(skip["place"], skip["reason"]) for skip in talks.skips()] == [
        ("talks.jsonl line 1", "no_messages"),
        ("talks.jsonl line 2", "no_assistant_turn"),
        ("talks.jsonl line 3", "assistant_first"),
        ("talks.jsonl line 7", "empty_answer"),
        ("talks.jsonl line 8", "null_content"),
    ]
    assert [answers for answers, _ in talks.islands()] == [
        ["Hello.<|im_end|>"],
        ["Hello.<|im_end|>", "Well.<|im_end|>"],
        ["Well.<|im_end|>"],
        ["It is blue.<|im_end|>"],
    ]
    two_questions, _, unanswered, _ = [rest for _, rest in talks.islands()]
    assert two_questions[0] == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>user\nAnd you?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "And you?" not in "".join(unanswered)


@pytest.mark.parametrize(
    ("records", "line", "reason"),
    [
        ([GOOD, NINE[7], NINE[0]], 2, "null_content"),
        ([GOOD, [], GOOD], 2, "not_a_record"),
        ([GOOD, talk("Hi", "Ho<|im_end|>")], 2, "special_token_in_answer"),
        ([GOOD, talk("Hi", "Ho"), GOOD], 3, "duplicate"),
    ],
)
def test_strict_mode_stops_at_the_first_bad_line_and_names_it(
    talks: Talks,
    records,
    line,
    reason,
):
    error = talks.refused(talks.write(records), "--set", "prepare.strict=true")
    assert f"talks.jsonl line {line}: {reason}: " in error
    assert not (talks.output / "manifest.json").exists()


def test_what_can_be_seen_without_the_target_costs_no_sealed_output(talks: Talks):
    talks.kept([GOOD, talk("A?", "Yes.")])
    before = (talks.output / "manifest.json").read_bytes()
    talks.refused(talks.write(NINE), "--set", "prepare.strict=true")
    talks.refused(talks.write(NINE[:3]))
    too_few = talks.refused(talks.write(NINE))
    assert "4 of 9 records kept" in too_few
    assert "least_kept_share, 50%" in too_few
    assert (talks.output / "manifest.json").read_bytes() == before


def test_first_records_of_no_kind_lose_no_good_one_behind_them(talks: Talks):
    lines = ["", "[]", "null", '"text"', "7", "{", json.dumps(GOOD), "{}", "]", "[[", "\x00"]
    lines += [json.dumps(talk("A?", "Yes.")), '{"messages": {}}']
    path = talks.root / "mixed.jsonl"
    path.write_text("\n".join(lines))
    done = talks.prepare(path, "--set", "prepare.least_kept_share=0")
    assert done.status == 0, done.err
    counts = talks.counts()
    assert (counts["read"], counts["kept"]) == (12, 2)
    assert counts["skipped"] == {
        "not_a_record": 4,
        "unreadable": 4,
        "no_conversation": 1,
        "bad_turns": 1,
    }
    assert [skip["place"] for skip in talks.skips() if skip["reason"] == "unreadable"] == [
        "mixed.jsonl line 6",
        "mixed.jsonl line 9",
        "mixed.jsonl line 10",
        "mixed.jsonl line 11",
    ]
