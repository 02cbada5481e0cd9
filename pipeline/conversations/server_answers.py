"""Answers written by the target on an SGLang server: token ids in, token ids out, resumable.

The lines are those of `answers.py`, in the prompts' order: an answer that is ready early waits for
those before it, so the file is always a whole beginning of the finished one, and a resume goes on
behind its last whole line. The server batches as it likes; in bfloat16 the batch decides the last
bits of a logit, so a resumed run may differ from an uninterrupted one where two tokens tie.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.capture.sglang_generate import Generated, Limits, Prompt, Server, generate
from pipeline.conversations.answering import (
    answer_record,
    bind_answers,
    check_lengths,
    encode_prompt,
    read_prompt_file,
)
from pipeline.conversations.answers import append_batch, take_back
from pipeline.conversations.errors import ConversationError


@dataclass(frozen=True)
class AnswerRequest:
    """What is to be answered, and how.

    folder: the target. prompts: JSON lines of id and messages. out: the answers' file, which grows.
    end_of_turn_ids: ids that end an answer. dtype: what the server computes in.
    """

    folder: Path
    prompts: Path
    out: Path
    max_new_tokens: int
    dtype: Literal["float32", "bfloat16"]
    end_of_turn_ids: frozenset[int]


@dataclass(frozen=True)
class Unanswered:
    """Checked and encoded prompts, of which the first `done` are answered in the file already."""

    request: AnswerRequest
    prompts: Sequence[dict[str, Any]]
    encoded: Sequence[Sequence[int]]
    done: int

    @property
    def left(self) -> int:
        """Prompts without an answer."""
        return len(self.prompts) - self.done


def plan_answers(request: AnswerRequest, tokenizer: Any) -> Unanswered:
    """Everything that can fail without a server: prompts, template, lengths, an earlier try's file.

    Cuts a half-written last line off the file. ConversationError when a prompt cannot be answered,
    or the file was begun with other settings, prompts or another target.
    """
    if request.max_new_tokens < 1 or not request.end_of_turn_ids:
        raise ConversationError(
            f"{request.max_new_tokens} new tokens, end-of-turn ids "
            f"{sorted(request.end_of_turn_ids)}",
            wanted="at least 1 token and one end-of-turn id",
            next_step="correct the answers' settings in the profile",
        )
    prompts = read_prompt_file(request.prompts)
    encoded = [encode_prompt(tokenizer, prompt["messages"]) for prompt in prompts]
    check_lengths(request.folder, prompts, encoded, limit=request.max_new_tokens)
    plan = {
        "engine": "sglang",
        "max_new_tokens": request.max_new_tokens,
        "dtype": request.dtype,
        "end_of_turn_ids": sorted(request.end_of_turn_ids),
    }
    bind_answers(request.out, plan, folder=request.folder, encoded=encoded)
    done = take_back(request.out, [[prompt["id"]] for prompt in prompts])
    return Unanswered(request, prompts, encoded, done)


def write_answers(
    plan: Unanswered,
    server: Server,
    tokenizer: Any,
    *,
    concurrency: int,
    timeout_seconds: float,
    advance: Callable[[Generated], None],
) -> None:
    """Appends the answers that are missing, each on the disk before the next one is counted.

    concurrency: requests that the server has at once. advance: called with each answer when it is
    in the file. Faults of the server and GenerationFailed end it; what is written stays.
    """
    request = plan.request
    limits = Limits(request.max_new_tokens, request.end_of_turn_ids, concurrency, timeout_seconds)
    rest = range(plan.done, len(plan.prompts))
    asked = (Prompt(plan.prompts[at]["id"], tuple(plan.encoded[at])) for at in rest)
    with closing(generate(server, asked, limits=limits)) as answers:
        for at, answer in zip(rest, answers, strict=True):
            record = answer_record(
                plan.prompts[at],
                plan.encoded[at],
                answer.output_ids,
                end_ids=request.end_of_turn_ids,
                tokenizer=tokenizer,
            )
            append_batch(request.out, [record])
            advance(answer)
