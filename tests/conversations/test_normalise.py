"""One shape for every conversation; a documented rule and a stable reason for all else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.normalise import Conversation, Skip, normalise

U = {"role": "user", "content": "Hi"}
A = {"role": "assistant", "content": "Hello."}
S = {"role": "system", "content": "Be kind."}
TALK = [U, A, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "See you."}]
CALL = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": {"x": None}}}


def share(role_key: str, text_key: str, user: str, assistant: str) -> list[dict[str, str]]:
    names = {"user": user, "assistant": assistant}
    return [{role_key: names[turn["role"]], text_key: turn["content"]} for turn in TALK]


SAME = {
    "from human/gpt": {
        "conversations": share("from", "value", "human", "gpt"),
        "system": "Be kind.",
    },
    "from user/assistant": {
        "conversations": [
            {"from": "system", "value": "Be kind."},
            *share("from", "value", "user", "assistant"),
        ]
    },
    "messages": {"messages": [S, *TALK]},
    "role under conversations": {"conversations": [S, *TALK], "system": "Be kind."},
    "system field": {"messages": TALK, "system": "Be kind."},
    "from under messages": {
        "messages": share("from", "value", "human", "gpt"),
        "system": "Be kind.",
    },
    "both, the same": {
        "messages": TALK,
        "conversations": share("from", "value", "human", "gpt"),
        "system": "Be kind.",
    },
    "the other column null": {"messages": [S, *TALK], "conversations": None},
    "the other column empty": {"messages": [S, *TALK], "conversations": []},
    "parts": {
        "messages": [
            S,
            {
                "role": "user",
                "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}],
            },
            *TALK[1:],
        ]
    },
    "nulls in turns": {
        "messages": [{**turn, "tool_calls": None, "name": None} for turn in [S, *TALK]]
    },
    "empty tool calls": {"messages": [S, TALK[0], {**A, "tool_calls": []}, *TALK[2:]]},
    "extra fields": {"messages": [S, *TALK], "id": 7, "score": 0.5, "tools": []},
}


@pytest.mark.parametrize("name", SAME)
def test_every_known_shape_of_a_talk_gives_the_same_conversation(name):
    assert normalise(SAME[name]) == Conversation(messages=(S, *TALK), tools=None, cut=False)


SKIPPED = [
    ({"messages": []}, "no_messages", "messages"),
    ({"messages": [S]}, "no_assistant_turn", "1 turns"),
    ({"messages": [U, U]}, "no_assistant_turn", "2 turns"),
    ({"messages": [A, U, A]}, "assistant_first", "first"),
    ({"messages": [S, A]}, "assistant_first", "first"),
    ({"messages": [U, {"role": "assistant", "content": ""}]}, "empty_answer", "turn 1"),
    ({"messages": [U, {"role": "assistant", "content": " \n"}, *TALK]}, "empty_answer", "turn 1"),
    ({"messages": [U, {"role": "assistant", "content": None}]}, "null_content", "messages[1]"),
    ({"messages": [U, {"role": "assistant"}]}, "null_content", "messages[1]"),
    ({"messages": [{"role": "user", "content": None}, A]}, "null_content", "messages[0]"),
    ({"messages": [U, {"role": "observation", "content": "x"}, A]}, "unknown_role", "observation"),
    ({"messages": TALK, "conversations": [U, A]}, "two_conversations", "conversations"),
    ({"messages": [S, U, A], "system": "Be rude."}, "two_systems", "differ"),
    ({"text": "<|user|>Hi<|assistant|>Hello."}, "no_conversation", "text"),
    ({}, "no_conversation", "none"),
    ([U, A], "not_a_record", "list"),
    (None, "not_a_record", "null"),
    ({"messages": "Hi"}, "bad_turns", "string"),
    ({"messages": ["Hi"]}, "bad_turn", "messages[0]"),
    ({"messages": [{"content": "Hi"}, A]}, "bad_turn", "no role"),
    ({"messages": [{"role": 1, "content": "Hi"}, A]}, "bad_turn", "no role"),
    ({"messages": [{"role": "user", "from": "gpt", "content": "Hi"}, A]}, "bad_turn", "from"),
    ({"messages": [{"role": "user", "content": "Hi", "value": "Ho"}, A]}, "bad_turn", "value"),
    ({"messages": [{"role": "user", "content": 5}, A]}, "bad_content", "number"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, A]},
        "unsupported_content",
        "image_url",
    ),
    ({"messages": [U, {**A, "tool_calls": "f()"}]}, "bad_turn", "tool_calls"),
    ({"messages": [U, A], "tools": "f()"}, "bad_tools", "JSON"),
    ({"messages": [U, A], "tools": {"name": "f"}}, "bad_tools", "object"),
    ({"messages": [U, {**A, "finish_reason": "length"}, U, A]}, "cut_before_end", "turn 1"),
]


@pytest.mark.parametrize(("record", "reason", "named"), SKIPPED)
def test_all_else_is_skipped_with_its_reason(record, reason, named):
    with pytest.raises(Skip) as caught:
        normalise(record)
    assert caught.value.reason == reason
    assert named in caught.value.detail


@pytest.mark.parametrize("messages", [[U, U, A], [U, A, A], [S, U, U, A, A]])
def test_two_turns_of_one_role_stay_two_turns(messages):
    assert normalise({"messages": messages}).messages == tuple(messages)


def test_turns_after_the_last_answer_are_dropped_and_counted():
    conversation = normalise({"messages": [U, A, U, U]})
    assert conversation.messages == (U, A)
    assert conversation.dropped_turns == 2


def test_an_empty_question_is_kept():
    empty = {"role": "user", "content": ""}
    assert normalise({"messages": [empty, A]}).messages == (empty, A)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [U, A], "finish_reason": "length"},
        {"messages": [U, {**A, "finish_reason": "length"}]},
        {"messages": [U, A, U], "finish_reason": "length"},
    ],
)
def test_an_answer_ended_by_length_is_marked_as_cut(record):
    conversation = normalise(record)
    assert conversation.cut
    assert conversation.messages == (U, A)


def test_an_answer_ended_by_itself_is_not_cut():
    assert not normalise({"messages": [U, A], "finish_reason": "stop"}).cut


def test_tool_calls_are_kept_whole_and_null_content_beside_them_is_empty():
    turn = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": None}]}
    result = {"role": "tool", "tool_call_id": "f:0", "content": "5"}
    messages = normalise({"messages": [U, turn, result, A]}).messages
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert messages[2] == result


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_are_read_as_a_list_or_as_its_json(as_text):
    tools = [{"type": "function", "function": {"name": "f"}}]
    given_tools: Any = json.dumps(tools) if as_text else tools
    assert normalise({"messages": [U, A], "tools": given_tools}).tools == tools


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "from", "value", "messages", "tool_calls", "tools"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": JSON}
)


@given(st.one_of(JSON, st.fixed_dictionaries({"messages": st.lists(TURN, max_size=5)})))
def test_any_value_is_either_a_conversation_or_a_skip(value):
    outcome = outcome_of(value)
    if isinstance(outcome, Skip):
        assert outcome.reason.isidentifier()
    else:
        assert outcome.messages[-1]["role"] == "assistant"
        assert all(isinstance(message["content"], str) for message in outcome.messages)


def outcome_of(value: Any) -> Conversation | Skip:
    try:
        return normalise(value)
    except Skip as skip:
        return skip
