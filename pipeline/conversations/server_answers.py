"""Answers written by the target on an SGLang server: token ids in, token ids out, resumable.

The lines are those of `answers.py`, in the prompts' order: an answer that is ready early waits for
those before it. A prompt that the server gives no answer to after several tries has no line; it is
told, and a resume asks for it again, as for all that have none, and for no other. The server
batches as it likes; in bfloat16 the batch decides the last bits of a logit, so a resumed run may
differ from an uninterrupted one where two tokens tie.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.capture.sglang_generate import (
    Generated,
    Limits,
    NoAnswer,
    Prompt,
    Server,
    generate,
)
from pipeline.conversations.answering import (
    answer_record,
    bind_answers,
    check_lengths,
    encode_prompt,
    read_prompt_file,
)
from pipeline.conversations.answers import answered_ids, append_batch
from pipeline.conversations.errors import ConversationError
from pipeline.conversations.normalise import Skip

_MOST_UNANSWERED_IN_A_ROW = 16  # then it is the server, not the prompts


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
    """Checked and encoded prompts. left: the places of those without an answer in the file."""

    request: AnswerRequest
    prompts: Sequence[dict[str, Any]]
    encoded: Sequence[Sequence[int]]
    left: Sequence[int]

    @property
    def done(self) -> int:
        """Prompts that have an answer already."""
        return len(self.prompts) - len(self.left)


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
    encoded = [encode_prompt(tokenizer, one["messages"], one["tools"]) for one in prompts]
    check_lengths(request.folder, prompts, encoded, limit=request.max_new_tokens)
    plan = {
        "engine": "sglang",
        "max_new_tokens": request.max_new_tokens,
        "dtype": request.dtype,
        "end_of_turn_ids": sorted(request.end_of_turn_ids),
    }
    bind_answers(request.out, plan, folder=request.folder, encoded=encoded)
    done = answered_ids(request.out, {prompt["id"] for prompt in prompts})
    left = [at for at, prompt in enumerate(prompts) if prompt["id"] not in done]
    return Unanswered(request, prompts, encoded, left)


def write_answers(
    plan: Unanswered,
    server: Server,
    tokenizer: Any,
    *,
    concurrency: int,
    timeout_seconds: float,
    advance: Callable[[Generated], None],
) -> dict[str, Skip]:
    """Appends the answers that are missing, each on the disk before the next one is counted.

    concurrency: requests that the server has at once. advance: called with each answer when it is
    in the file. Gives, by prompt, why it has no answer. Faults of the server, GenerationFailed, and
    many prompts in a row without an answer end it; what is written stays.
    """
    request = plan.request
    limits = Limits(request.max_new_tokens, request.end_of_turn_ids, concurrency, timeout_seconds)
    places = {plan.prompts[at]["id"]: at for at in plan.left}
    asked = (Prompt(name, tuple(plan.encoded[at])) for name, at in places.items())
    request.out.touch()  # there is a file even where no prompt gets an answer
    missing: dict[str, Skip] = {}
    in_a_row = 0

    def unanswered(prompt: Prompt, fault: NoAnswer) -> None:
        nonlocal in_a_row
        in_a_row += 1
        if in_a_row >= _MOST_UNANSWERED_IN_A_ROW:
            raise fault
        missing[prompt.id] = Skip(fault.reason, fault.found)

    with closing(generate(server, asked, limits=limits, unanswered=unanswered)) as answers:
        for answer in answers:
            in_a_row = 0
            at = places[answer.prompt.id]
            record = answer_record(
                plan.prompts[at],
                plan.encoded[at],
                answer.output_ids,
                end_ids=request.end_of_turn_ids,
                tokenizer=tokenizer,
            )
            append_batch(request.out, [record])
            advance(answer)
    return missing
