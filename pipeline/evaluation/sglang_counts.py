"""The server's counters in this project's terms, and both ways of counting side by side.

The one convention (see `acceptance.py`): acceptance length is tokens emitted / decode passes over
all prompts together, the bonus token of a pass included; the prefill and the token that it gives
are not counted.

SGLang (0.5.17 to 0.5.23, `tokenizer_manager.py`) reports for each request, in `meta_info`:

- `completion_tokens`: tokens of the answer, the prefill's among them -> ours is one less;
- `spec_verify_ct`: passes of the target that judged drafts -> our decode passes;
- `spec_correct_drafts_histogram`: how many passes accepted 0, 1, 2 .. drafts; drafts behind the
  answer's end of turn or limit count there, which in our loop they do not;
- `spec_accept_length`: completion_tokens / spec_verify_ct for one request. The prefill's token
  makes it too high, most for short answers, so it is not used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.evaluation.acceptance import Acceptance, Difference, PositionRate
from pipeline.evaluation.errors import EvaluationError

AGREEMENT = 0.02
"""Largest relative distance of the two acceptance lengths."""


@dataclass(frozen=True)
class ServerCounts:
    """Of one drafted answer: tokens emitted by decode passes, those passes, drafts they accepted.

    accepted[i] is the number of passes that accepted i drafts; they may sum up to more tokens than
    were emitted, for the last pass can accept drafts that the answer's end cuts off.
    """

    tokens: int
    passes: int
    accepted: tuple[int, ...]


def read_counts(meta: Mapping[str, Any], *, draft_tokens: int) -> ServerCounts:
    """The counters of one answer's `meta_info`, translated.

    EvaluationError when the server did not draft, or counts that contradict each other.
    """
    tokens = int(meta["completion_tokens"]) - 1
    if not tokens:
        return ServerCounts(0, 0, ())
    passes = int(meta.get("spec_verify_ct") or 0)
    histogram = tuple(int(count) for count in meta.get("spec_correct_drafts_histogram") or ())
    bound = sum((drafts + 1) * count for drafts, count in enumerate(histogram))
    if not (
        passes > 0
        and sum(histogram) == passes
        and len(histogram) <= draft_tokens + 1
        and tokens <= bound <= tokens + draft_tokens
    ):
        raise EvaluationError(
            f"the server's counters for an answer of {tokens + 1} tokens: "
            f"{ {name: value for name, value in meta.items() if name.startswith('spec_')} }",
            wanted=f"passes of up to {draft_tokens} drafts that sum up to {tokens} tokens",
            next_step="see in the server's log whether it drafts; a new version of SGLang may "
            "count otherwise (pipeline/evaluation/sglang_counts.py)",
        )
    return ServerCounts(tokens, passes, histogram)


@dataclass(frozen=True)
class ServerOutcome:
    """One prompt answered by the server without and with the drafter.

    difference: None when both answers are the same ids. Its gaps are None: the server gives none.
    """

    prompt: str
    prompt_tokens: int
    plain_ids: tuple[int, ...]
    drafted_ids: tuple[int, ...]
    counts: ServerCounts
    difference: Difference | None

    def to_json(self) -> dict[str, Any]:
        """The outcome as a JSON object; `from_json` reads it back."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "ServerOutcome":
        """Reads what `to_json` wrote. KeyError or TypeError when it is something else."""
        difference, counts = value["difference"], value["counts"]
        return ServerOutcome(
            prompt=value["prompt"],
            prompt_tokens=value["prompt_tokens"],
            plain_ids=tuple(value["plain_ids"]),
            drafted_ids=tuple(value["drafted_ids"]),
            counts=ServerCounts(counts["tokens"], counts["passes"], tuple(counts["accepted"])),
            difference=None if difference is None else Difference(**difference),
        )


def server_outcome(
    prompt: str,
    prompt_tokens: int,
    *,
    plain_ids: Sequence[int],
    drafted_ids: Sequence[int],
    counts: ServerCounts,
) -> ServerOutcome:
    """Puts one prompt's two answers side by side."""
    plain, drafted = tuple(plain_ids), tuple(drafted_ids)
    difference = None
    if plain != drafted:
        shared = min(len(plain), len(drafted))
        at = next((i for i in range(shared) if plain[i] != drafted[i]), shared)
        difference = Difference(
            prompt=prompt,
            position=at,
            plain_token=plain[at] if at < len(plain) else None,
            drafted_token=drafted[at] if at < len(drafted) else None,
            plain_gap=None,
            drafted_gap=None,
        )
    return ServerOutcome(prompt, prompt_tokens, plain, drafted, counts, difference)


def summarise_server(
    outcomes: Sequence[ServerOutcome],
    *,
    draft_tokens: int,
    plain_seconds: float,
    drafted_seconds: float,
) -> Acceptance:
    """Adds up the prompts of a run on the server.

    *_seconds: wall time of all prompts, prefills in (the server overlaps them with decoding, so
    they cannot be told apart). Rates by position and tokens_per_pass come from the server's
    histogram, see the module. EvaluationError when no prompt needed a decode pass.
    """
    passes = sum(outcome.counts.passes for outcome in outcomes)
    if not passes:
        raise EvaluationError(
            f"{len(outcomes)} prompts and not one decode pass",
            wanted="prompts whose answers are longer than one token",
            next_step="raise evaluate.max_new_tokens or give more held-out prompts",
        )
    histogram = [0] * (draft_tokens + 1)
    for outcome in outcomes:
        for drafts, count in enumerate(outcome.counts.accepted):
            histogram[drafts] += count
    at_least = [sum(histogram[drafts:]) for drafts in range(draft_tokens + 2)]
    return Acceptance(
        prompts=len(outcomes),
        identical=sum(outcome.difference is None for outcome in outcomes),
        draft_tokens=draft_tokens,
        tokens=sum(outcome.counts.tokens for outcome in outcomes),
        passes=passes,
        plain_passes=sum(len(outcome.plain_ids) - 1 for outcome in outcomes),
        positions=tuple(
            PositionRate(position=j, judged=passes, reached=at_least[j], accepted=at_least[j + 1])
            for j in range(draft_tokens)
        ),
        tokens_per_pass=tuple(histogram),
        plain_seconds=plain_seconds,
        drafted_seconds=drafted_seconds,
        plain_prefill_seconds=0.0,
        drafted_prefill_seconds=0.0,
        first_difference=next((o.difference for o in outcomes if o.difference is not None), None),
    )


@dataclass(frozen=True)
class Agreement:
    """The acceptance length that the server reports beside the one of this project's own loop.

    same_answers: prompts whose drafted answer by the server is the loop's plain one, id for id.
    """

    server: float
    loop: float
    server_passes: int
    loop_passes: int
    prompts: int
    same_answers: int

    @property
    def relative(self) -> float:
        """Distance of the two as a share of the loop's."""
        return abs(self.server - self.loop) / self.loop

    @property
    def holds(self) -> bool:
        """Whether they agree within `AGREEMENT`."""
        return self.relative <= AGREEMENT

    def to_json(self) -> dict[str, Any]:
        """Fields and derived figures as a JSON object."""
        return {**asdict(self), "relative": self.relative, "allowed": AGREEMENT}
