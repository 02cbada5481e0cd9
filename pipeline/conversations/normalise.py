"""One shape for every conversation: role/content messages, or a Skip with the reason.

Roles come from the record, never from a turn's position. The rules, in full:

    record            what happens
    ----------------  --------------------------------------------------------------------------
    messages          role/content turns; from/value turns are read just as well
    conversations     from/value turns (ShareGPT); role/content turns are read just as well
    both columns      kept if both say the same, else skipped: two_conversations
    neither           skipped: no_conversation (also plain `text`: its turns could only be guessed)
    system (a field)  becomes the first message; next to a differing system message: two_systems
    tools             a list, or that list as a JSON string; else bad_tools
    finish_reason     "length": the last answer was cut off (Conversation.cut); also read from the
                      last answer itself; on an earlier answer: cut_before_end
    other fields      ignored in the record; handed to the template in a turn (name, tool_calls,
                      tool_call_id, reasoning_content, ...), nulls left out

    turn              what happens
    ----------------  --------------------------------------------------------------------------
    human, user       user
    gpt, assistant    assistant
    system, tool      themselves
    any other role    skipped: unknown_role
    list of text      the parts' texts joined, equal to the plain string; any other part (an image):
                      unsupported_content
    null content      "" for an assistant turn that calls tools; else skipped: null_content
    empty answer      skipped: empty_answer (assistant, no tool calls, nothing but whitespace)
    empty user turn   kept as it is: an empty question is a question

    order             what happens
    ----------------  --------------------------------------------------------------------------
    no turn           skipped: no_messages
    no assistant      skipped: no_assistant_turn (system only, questions only)
    assistant first   skipped: assistant_first (nothing was asked, so nothing was answered)
    last turn asks    turns after the last assistant turn are dropped and counted (dropped_turns)
    two user turns,   kept as two turns, never merged; a template that refuses them has the last
    two answers       word (render.py: template_refused)
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
COLUMNS = ("messages", "conversations")
RECORD_KEYS = (*COLUMNS, "system", "tools", "finish_reason", "id")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_CONSUMED = frozenset({"role", "from", "content", "value", "finish_reason"})


class Skip(Exception):
    """One record is left out. reason: a stable snake_case code to count by; detail: for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class Conversation:
    """Messages that end with an assistant turn and hold a user turn before the first one.

    messages: dicts with `role` (user, assistant, system, tool), `content` (str) and whatever else
    the record's turn carried; tools: the tool declarations for the template, or None; cut: the last
    answer was ended by a length limit, so its end-of-turn is not the target's; dropped_turns: turns
    after the last assistant turn, left out of messages.
    """

    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None
    cut: bool
    dropped_turns: int = 0


def normalise(value: Any) -> Conversation:
    """The conversation in one record, by the rules above. Raises Skip."""
    if not isinstance(value, dict):
        raise Skip("not_a_record", f"a JSON {_kind(value)}, wanted an object with {COLUMNS[0]}")
    messages, finish = _turns(value)
    messages = _with_system(messages, value.get("system"))
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise Skip("no_assistant_turn", f"{len(messages)} turns, none by the assistant")
    if not any(message["role"] in ("user", "tool") for message in messages[: answers[0]]):
        raise Skip("assistant_first", "no user turn before the first assistant turn")
    _refuse_empty_answers(messages)
    for i in answers[:-1]:
        if finish.get(id(messages[i])) == "length":
            raise Skip("cut_before_end", f"turn {i}: cut off by length, yet turns follow")
    _refuse_half_characters(messages)
    last = answers[-1]
    cut = "length" in (value.get("finish_reason"), finish.get(id(messages[last])))
    return Conversation(
        messages=tuple(messages[: last + 1]),
        tools=tools_of(value),
        cut=cut,
        dropped_turns=len(messages) - last - 1,
    )


def _turns(value: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """The messages of a record and, by id() of each message, its own finish reason."""
    found = [column for column in COLUMNS if value.get(column) is not None]
    if not found:
        keys = ", ".join(sorted(map(str, value))[:8]) or "none"
        raise Skip("no_conversation", f"neither {' nor '.join(COLUMNS)}; fields: {keys}")
    filled = [column for column in found if value[column] != []]  # tables fill with [] too
    read = [_column(value[column], column) for column in filled or found[:1]]
    if len(read) == 2 and [m for m, _ in read[0]] != [m for m, _ in read[1]]:
        raise Skip("two_conversations", "messages and conversations are both there and differ")
    messages = [message for message, _ in read[0]]
    return messages, {id(message): finish for message, finish in read[0]}


def _column(turns: Any, column: str) -> list[tuple[dict[str, Any], Any]]:
    if not isinstance(turns, list):
        raise Skip("bad_turns", f"{column} is a {_kind(turns)}, wanted a list of turns")
    if not turns:
        raise Skip("no_messages", f"{column} is an empty list")
    return [_message(turn, place=f"{column}[{i}]") for i, turn in enumerate(turns)]


def _message(turn: Any, *, place: str) -> tuple[dict[str, Any], Any]:
    """One turn as role/content plus its other fields, and its own finish reason if it has one."""
    if not isinstance(turn, dict):
        raise Skip("bad_turn", f"{place} is a {_kind(turn)}, wanted an object")
    role = _role(turn, place=place)
    # Null means absent: tables fill every field that some other row has with nulls.
    rest = {key: v for key, v in turn.items() if v is not None and key not in _CONSUMED}
    calls = rest.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise Skip("bad_turn", f"{place}: tool_calls is a {_kind(calls)}, wanted a list")
    if calls == []:
        del rest["tool_calls"]
    elif calls is not None:
        rest["tool_calls"] = [_without_nulls(call) for call in calls]
    content = _content(_said(turn, place=place), place=place)
    if content is None:
        if role != "assistant" or "tool_calls" not in rest:
            raise Skip("null_content", f"{place}: {role} turn without content")
        content = ""  # a template that prints it must not print the word None
    return {"role": role, "content": content, **rest}, turn.get("finish_reason")


def _role(turn: dict[str, Any], *, place: str) -> str:
    named = [turn[key] for key in ("role", "from") if turn.get(key) is not None]
    if not named or not all(isinstance(name, str) for name in named):
        raise Skip("bad_turn", f"{place}: no role, wanted a string under role or from")
    for name in named:
        if name not in ROLES:
            raise Skip("unknown_role", f"{place}: role {name!r}, known: {', '.join(ROLES)}")
    roles = {ROLES[name] for name in named}
    if len(roles) > 1:
        raise Skip("bad_turn", f"{place}: role and from are both there and differ")
    return roles.pop()


def _said(turn: dict[str, Any], *, place: str) -> Any:
    said = [turn[key] for key in ("content", "value") if turn.get(key) is not None]
    if len(said) == 2 and said[0] != said[1]:
        raise Skip("bad_turn", f"{place}: content and value are both there and differ")
    return said[0] if said else None


def _content(content: Any, *, place: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Skip("bad_content", f"{place}: content is a {_kind(content)}, wanted text")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else part.get("text") if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            named = f"of type {kind!r}" if isinstance(part, dict) else f"a {_kind(part)}"
            raise Skip("unsupported_content", f"{place}: part {i} is {named}, wanted text")
        texts.append(text)
    return "".join(texts)


def _without_nulls(call: Any) -> Any:
    """A tool call without null fields; its arguments stay untouched: a null there is a value."""
    if not isinstance(call, dict):
        return call
    return {
        key: _without_nulls(v) if key == "function" else v
        for key, v in call.items()
        if v is not None
    }


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    text = _content(system, place="system")
    if not text:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    if messages[0]["content"] != text:
        raise Skip("two_systems", "the system field and the system message differ")
    return messages


def _refuse_empty_answers(messages: list[dict[str, Any]]) -> None:
    for i, message in enumerate(messages):
        silent = not message["content"].strip() and "tool_calls" not in message
        if message["role"] == "assistant" and silent:
            raise Skip("empty_answer", f"turn {i}: the assistant says nothing")


def _refuse_half_characters(value: Any) -> None:
    """Raises Skip for half of a surrogate pair, which no file in UTF-8 can hold."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise Skip("bad_text", f"not encodable: {error.reason}") from error
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def tools_of(value: dict[str, Any]) -> list[Any] | None:
    """The tool declarations of a record, None where it has none. Raises Skip."""
    tools = value.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise Skip("bad_tools", f"tools is a string, but not JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Skip("bad_tools", f"tools is a {_kind(tools)}, wanted a list of objects")
    return tools


def _kind(value: Any) -> str:
    """The JSON name of a value's type, for people."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, int | float) else "value")


def prompt_messages(value: Any) -> list[dict[str, Any]]:
    """The messages before the first answer, for the target to answer anew. Raises Skip.

    The record may hold answers or none; it is refused as `normalise` would refuse it otherwise.
    """
    try:
        messages = list(normalise(value).messages)
    except Skip as skip:
        if skip.reason != "no_assistant_turn":
            raise
        messages = _with_system(_turns(value)[0], value.get("system"))
    first = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asked = messages[: first[0]] if first else messages
    _refuse_half_characters(asked)
    if not any(message["role"] == "user" for message in asked):
        raise Skip("no_user_turn", "nothing that the target could answer")
    return asked
