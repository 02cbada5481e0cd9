"""Answers written by the target: the file they grow in, how it is resumed, what is kept of it.

One line an answer, appended batch by batch. Batches are planned from the whole list of prompts, and
a half-finished batch is taken back before a resume: generation depends in its last bits on which
prompts share a batch, so a resumed run equals an uninterrupted one only when the batches do.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.conversations.errors import ConversationError
from pipeline.settings.strict_json import parse_json
from pipeline.slate.files import named

WINDOW = 512  # prompts that are sorted by length together
_REASONS = ("stop", "length")
_NEXT_STEP = "delete the file and run the stage again without RESUME=1"

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Answer:
    """One prompt and what the target wrote after it, in token ids that were never re-encoded.

    answer_ids end with an end-of-turn id for `stop`; for `length` the answer was cut, and there is
    none. messages: the conversation as text, the answer last, for people to read.
    """

    id: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish_reason: FinishReason
    messages: tuple[dict[str, Any], ...]

    @property
    def input_ids(self) -> list[int]:
        """The sample's tokens: prompt, then answer."""
        return [*self.prompt_ids, *self.answer_ids]

    @property
    def supervised(self) -> list[bool]:
        """True exactly on what the target wrote; a cut answer has no end of turn to supervise."""
        return [False] * len(self.prompt_ids) + [True] * len(self.answer_ids)


@dataclass(frozen=True)
class AnswerCounts:
    """read = stop + length + empty + repeated; kept = stop + length."""

    read: int
    stop: int
    length: int
    empty: int
    repeated: int

    @property
    def kept(self) -> int:
        """Answers that become samples; the cut ones are among them."""
        return self.stop + self.length


def plan_batches(
    lengths: Sequence[int], *, batch_size: int, window: int = WINDOW
) -> tuple[tuple[int, ...], ...]:
    """Which prompts (by place) are answered together, in order; each is in exactly one batch.

    lengths: tokens of each prompt. Inside each window of `window` prompts they are sorted by
    length (ties by place), so that a batch needs little padding. ValueError unless sizes are
    positive.
    """
    if batch_size < 1 or window < 1:
        raise ValueError(f"batch_size {batch_size}, window {window}")
    batches: list[tuple[int, ...]] = []
    for start in range(0, len(lengths), window):
        places = range(start, min(start + window, len(lengths)))
        ordered = sorted(places, key=lambda place: (lengths[place], place))
        batches += [
            tuple(ordered[at : at + batch_size]) for at in range(0, len(ordered), batch_size)
        ]
    return tuple(batches)


def append_batch(path: Path, answers: Iterable[Answer]) -> None:
    """Appends whole lines and syncs them to the disk. OSError as the system gives it."""
    lines = "".join(_to_line(answer) for answer in answers)
    with named(path), path.open("ab") as file:
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def take_back(path: Path, batches: Sequence[Sequence[str]]) -> int:
    """Cuts the file after its last whole batch and gives the number of whole batches.

    batches: the planned batches as prompts' ids. A half-written last line and a batch that is not
    all there are cut off; an absent file has none. ConversationError when a whole line does not
    belong to this plan.
    """
    if not path.exists():
        return 0
    planned = [prompt_id for batch in batches for prompt_id in batch]
    ends = _batch_ends(batches)
    found = 0
    whole_batches, whole_bytes, at = 0, 0, 0
    with named(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            answer = _from_line(line, where=f"{path}:{number}")
            if found >= len(planned) or answer.id != planned[found]:
                raise ConversationError(
                    f"{path}:{number}: answer {answer.id!r}",
                    wanted=f"{planned[found]!r}" if found < len(planned) else "no further line",
                    next_step=_NEXT_STEP,
                )
            found += 1
            at += len(line)
            if found in ends:
                whole_batches, whole_bytes = ends[found], at
    with named(path), path.open("rb+") as file:
        file.truncate(whole_bytes)
        os.fsync(file.fileno())
    return whole_batches


def answered_ids(path: Path, known: Collection[str]) -> set[str]:
    """The prompts that have an answer in a file of any order; an absent file has none.

    A half-written last line is cut off. ConversationError when a whole line is none of `known`'s,
    or one has two.
    """
    found: set[str] = set()
    if not path.exists():
        return found
    at = 0
    with named(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            answer = _from_line(line, where=f"{path}:{number}")
            if answer.id not in known or answer.id in found:
                raise ConversationError(
                    f"{path}:{number}: answer {answer.id!r}",
                    wanted="one answer to each of the prompts, and no other",
                    next_step=_NEXT_STEP,
                )
            found.add(answer.id)
            at += len(line)
    with named(path), path.open("rb+") as file:
        file.truncate(at)
        os.fsync(file.fileno())
    return found


def _batch_ends(batches: Sequence[Sequence[str]]) -> dict[int, int]:
    """Number of answers -> number of batches that these complete."""
    ends: dict[int, int] = {}
    total = 0
    for number, batch in enumerate(batches, start=1):
        total += len(batch)
        ends[total] = number
    return ends


def read_answers(
    path: Path, *, end_of_turn_ids: frozenset[int]
) -> tuple[list[Answer], AnswerCounts]:
    """The usable answers of a finished file, in file order, and the counts of all.

    An answer without a token besides ends of turn is empty; an id that was there before is
    repeated; both are left out. ConversationError when a line is broken, cut, or its finish reason
    contradicts its last token.
    """
    kept: list[Answer] = []
    seen: set[str] = set()
    counts = dict.fromkeys(("read", "stop", "length", "empty", "repeated"), 0)
    with named(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            answer = _from_line(line, where=f"{path}:{number}")
            ended = bool(answer.answer_ids) and answer.answer_ids[-1] in end_of_turn_ids
            if ended != (answer.finish_reason == "stop"):
                raise ConversationError(
                    f"{path}:{number}: answer {answer.id!r} has finish reason "
                    f"{answer.finish_reason!r} and ends with {answer.answer_ids[-1:]}",
                    wanted=f"'stop' exactly where it ends with one of {sorted(end_of_turn_ids)}",
                    next_step=_NEXT_STEP,
                )
            counts["read"] += 1
            if answer.id in seen:
                counts["repeated"] += 1
            elif end_of_turn_ids.issuperset(answer.answer_ids):
                counts["empty"] += 1
            else:
                counts[answer.finish_reason] += 1
                kept.append(answer)
            seen.add(answer.id)
    return kept, AnswerCounts(**counts)


def _to_line(answer: Answer) -> str:
    """One JSON line."""
    value = {
        "id": answer.id,
        "prompt_ids": answer.prompt_ids,
        "answer_ids": answer.answer_ids,
        "finish_reason": answer.finish_reason,
        "messages": answer.messages,
    }
    return json.dumps(value, ensure_ascii=False) + "\n"


def _from_line(line: bytes, *, where: str) -> Answer:
    """The answer on one line. ConversationError when it is no such thing."""
    try:
        value: Mapping[str, Any] = parse_json(line)
        if value["finish_reason"] not in _REASONS or not isinstance(value["id"], str):
            raise ValueError(f"id {value['id']!r}, finish reason {value['finish_reason']!r}")
        return Answer(
            id=value["id"],
            prompt_ids=tuple(map(int, value["prompt_ids"])),
            answer_ids=tuple(map(int, value["answer_ids"])),
            finish_reason=value["finish_reason"],
            messages=tuple(value["messages"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConversationError(
            f"{where}: {type(error).__name__}: {error}",
            wanted="one whole answer on each line",
            next_step=_NEXT_STEP,
        ) from error
