"""Greedy decoding twice: the target alone, and the target judging a drafter's chains.

Both loops take the target's own best token at every position, so in exact arithmetic they emit the
same tokens; the drafter decides only how many come out of one pass.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.evaluation.acceptance import Outcome, VerifyPass, find_difference
from pipeline.evaluation.passes import TargetPasses, recording
from pipeline.evaluation.serving import ServingDrafter


@dataclass(frozen=True)
class Decoded:
    """One answer. ids: its tokens, the end of turn included where it was reached.

    gaps: per token, highest minus second highest logit. passes: decode passes in order, the prefill
    not among them. Seconds of the prefill (which gives the first token) and of all decode passes.
    """

    ids: tuple[int, ...]
    gaps: tuple[float, ...]
    passes: tuple[VerifyPass, ...]
    prefill_seconds: float
    decode_seconds: float


def plain_decode(
    target: Any, prompt_ids: Sequence[int], *, max_new_tokens: int, end_ids: Collection[int]
) -> Decoded:
    """The target alone, one token a pass.

    prompt_ids: at least one token. Stops after a token of end_ids or after max_new_tokens (>= 1).
    """
    started = time.perf_counter()
    passes = TargetPasses(target)
    ids, gaps = _best(passes.run(prompt_ids, last=1))
    prefilled = time.perf_counter()
    while ids[-1] not in end_ids and len(ids) < max_new_tokens:
        best, gap = _best(passes.run(ids[-1:], last=1))
        ids += best
        gaps += gap
    return Decoded(
        ids=tuple(ids),
        gaps=tuple(gaps),
        passes=(VerifyPass(judged=0, accepted=0, emitted=1),) * (len(ids) - 1),
        prefill_seconds=prefilled - started,
        decode_seconds=time.perf_counter() - prefilled,
    )


def drafted_decode(
    target: Any,
    drafter: ServingDrafter,
    *,
    prompt_ids: Sequence[int],
    draft_tokens: int,
    max_new_tokens: int,
    end_ids: Collection[int],
) -> Decoded:
    """Draft, verify, accept: up to draft_tokens drafts a pass (fewer before the length limit).

    A pass runs the newest token and its drafts; the drafts that equal the target's own choices are
    accepted, and the choice after the last of them is emitted too. Otherwise as `plain_decode`.
    """
    started = time.perf_counter()
    verified: list[VerifyPass] = []
    with recording(target, drafter.taps) as taps:
        passes = TargetPasses(target)
        ids, gaps = _best(passes.run(prompt_ids, last=1))
        drafter.start(capacity=len(prompt_ids) + max_new_tokens + draft_tokens)
        drafter.extend([*prompt_ids[1:], ids[0]], taps.latest())
        prefilled = time.perf_counter()
        while ids[-1] not in end_ids and len(ids) < max_new_tokens:
            drafts = drafter.propose(min(draft_tokens, max_new_tokens - len(ids) - 1))
            choices, gap = _best(passes.run([ids[-1], *drafts], last=len(drafts) + 1))
            one, new = judge(drafts, choices, end_ids=end_ids)
            verified.append(one)
            ids += new
            gaps += gap[: len(new)]
            # Everything but the newest token has been run; the rejected drafts go.
            passes.keep(len(prompt_ids) + len(ids) - 1)
            drafter.extend(new, taps.latest()[: len(new)])
    return Decoded(
        ids=tuple(ids),
        gaps=tuple(gaps),
        passes=tuple(verified),
        prefill_seconds=prefilled - started,
        decode_seconds=time.perf_counter() - prefilled,
    )


def judge(
    drafts: Sequence[int], choices: Sequence[int], *, end_ids: Collection[int]
) -> tuple[VerifyPass, list[int]]:
    """What one pass accepts and emits.

    drafts [k]; choices [k + 1]: the target's best token after the newest token and each draft.
    Emitted are the accepted drafts and the choice after them, cut after the first token of end_ids.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
        accepted += 1
    new = list(choices[: accepted + 1])
    end = next((i for i, token in enumerate(new) if token in end_ids), None)
    judged = len(drafts)
    if end is not None:
        new = new[: end + 1]
        judged = min(judged, end + 1)
    one = VerifyPass(judged=judged, accepted=min(accepted, judged), emitted=len(new))
    return one, new


def decode_twice(
    prompt: str,
    target: Any,
    drafter: ServingDrafter,
    *,
    prompt_ids: Sequence[int],
    draft_tokens: int,
    max_new_tokens: int,
    end_ids: Collection[int],
) -> Outcome:
    """Decodes one prompt (named `prompt`) with and without the drafter and compares the answers."""
    plain = plain_decode(target, prompt_ids, max_new_tokens=max_new_tokens, end_ids=end_ids)
    drafted = drafted_decode(
        target,
        drafter,
        prompt_ids=prompt_ids,
        draft_tokens=draft_tokens,
        max_new_tokens=max_new_tokens,
        end_ids=end_ids,
    )
    return Outcome(
        prompt=prompt,
        prompt_tokens=len(prompt_ids),
        plain_ids=plain.ids,
        drafted_ids=drafted.ids,
        passes=drafted.passes,
        plain_passes=len(plain.passes),
        plain_seconds=plain.decode_seconds,
        drafted_seconds=drafted.decode_seconds,
        plain_prefill_seconds=plain.prefill_seconds,
        drafted_prefill_seconds=drafted.prefill_seconds,
        difference=find_difference(
            prompt,
            plain.ids,
            drafted=drafted.ids,
            plain_gaps=plain.gaps,
            drafted_gaps=drafted.gaps,
        ),
    )


def _best(logits: Tensor) -> tuple[list[int], list[float]]:
    """Best token of each row [n, V] and its lead over the second best."""
    top, best = logits.max(-1, keepdim=True)
    second = logits.scatter(-1, best, float("-inf")).max(-1, keepdim=True).values
    return best.flatten().tolist(), (top - second).flatten().tolist()
