"""What speculative decoding gave, counted: pure arithmetic over finished prompts, no torch.

How things are counted:

- A *decode pass* is a forward pass of the target after the prefill. The prefill gives the first
  token of an answer with and without a drafter, so neither that pass nor that token is counted.
- *Acceptance length* is tokens emitted / decode passes over all prompts together, the bonus token
  that each pass gives by itself included; 1 is what plain decoding has, 1 + K the most that K
  drafts allow.
- A draft counts as *judged* when the answer could have used it: not behind the length limit, not
  behind the answer's own end of turn. A rejected draft ends the pass; those behind it are judged
  too in the unconditional rate (they did not help), not in the conditional one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.evaluation.errors import EvaluationError


@dataclass(frozen=True)
class VerifyPass:
    """One decode pass: drafts judged, drafts accepted (a prefix), tokens emitted."""

    judged: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class Difference:
    """Where a drafted answer first leaves the plain one.

    position: index into the answer. *_token: the token there, None where that answer has ended.
    *_gap: highest minus second highest logit at that position in that loop, None likewise. Two gaps
    near the rounding of the dtype are a tie that the shape of the batch decided; anything larger is
    a fault in the loop.
    """

    prompt: str
    position: int
    plain_token: int | None
    drafted_token: int | None
    plain_gap: float | None
    drafted_gap: float | None


@dataclass(frozen=True)
class Outcome:
    """One prompt decoded twice. Seconds of the decode passes alone; prefills are apart.

    passes: of the drafted loop, in order. plain_passes: of the plain loop, one a token.
    """

    prompt: str
    prompt_tokens: int
    plain_ids: tuple[int, ...]
    drafted_ids: tuple[int, ...]
    passes: tuple[VerifyPass, ...]
    plain_passes: int
    plain_seconds: float
    drafted_seconds: float
    plain_prefill_seconds: float
    drafted_prefill_seconds: float
    difference: Difference | None

    def to_json(self) -> dict[str, Any]:
        """The outcome as a JSON object; `from_json` reads it back."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Outcome":
        """Reads what `to_json` wrote. KeyError or TypeError when it is something else."""
        difference = value["difference"]
        return Outcome(
            **{
                **value,
                "plain_ids": tuple(value["plain_ids"]),
                "drafted_ids": tuple(value["drafted_ids"]),
                "passes": tuple(VerifyPass(**one) for one in value["passes"]),
                "difference": None if difference is None else Difference(**difference),
            }
        )


@dataclass(frozen=True)
class PositionRate:
    """How often the draft at one position (0-based) of the chain was accepted.

    judged: passes in which the position was drafted and the answer could have used it.
    reached: those of them in which every earlier draft was accepted. accepted: those accepted.
    """

    position: int
    judged: int
    reached: int
    accepted: int

    @property
    def unconditional(self) -> float | None:
        """Accepted / judged; None where nothing was judged."""
        return self.accepted / self.judged if self.judged else None

    @property
    def conditional(self) -> float | None:
        """Accepted / reached; None where nothing was reached."""
        return self.accepted / self.reached if self.reached else None


@dataclass(frozen=True)
class Acceptance:
    """The measured outcome of all prompts together; see the module for what is counted."""

    prompts: int
    identical: int
    draft_tokens: int
    tokens: int
    passes: int
    plain_passes: int
    positions: tuple[PositionRate, ...]
    tokens_per_pass: tuple[int, ...]
    plain_seconds: float
    drafted_seconds: float
    plain_prefill_seconds: float
    drafted_prefill_seconds: float
    first_difference: Difference | None

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted a decode pass of the target, bonus token included."""
        return self.tokens / self.passes

    @property
    def speed_up(self) -> float:
        """Decode time without the drafter / decode time with it (same tokens, prefills apart)."""
        return self.plain_seconds / self.drafted_seconds

    @property
    def total_speed_up(self) -> float:
        """The same with both prefills in, as a user waits for it."""
        plain = self.plain_seconds + self.plain_prefill_seconds
        return plain / (self.drafted_seconds + self.drafted_prefill_seconds)

    def to_json(self) -> dict[str, Any]:
        """Fields and derived figures as a JSON object, for the manifest; `from_json` reads it."""
        return {
            **asdict(self),
            "acceptance_length": self.acceptance_length,
            "speed_up": self.speed_up,
            "total_speed_up": self.total_speed_up,
            "acceptance_by_position": [
                {"conditional": rate.conditional, "unconditional": rate.unconditional}
                for rate in self.positions
            ],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Acceptance":
        """Reads what `to_json` wrote (derived figures are derived again). KeyError otherwise."""
        fields = {name: value[name] for name in Acceptance.__dataclass_fields__}
        first = fields["first_difference"]
        return Acceptance(
            **{
                **fields,
                "positions": tuple(PositionRate(**rate) for rate in fields["positions"]),
                "tokens_per_pass": tuple(fields["tokens_per_pass"]),
                "first_difference": None if first is None else Difference(**first),
            }
        )


def find_difference(
    prompt: str,
    plain: Sequence[int],
    *,
    drafted: Sequence[int],
    plain_gaps: Sequence[float],
    drafted_gaps: Sequence[float],
) -> Difference | None:
    """The first position at which two answers differ, an early end included; None when equal.

    plain, drafted: token ids. *_gaps: per token, highest minus second highest logit, same lengths.
    """
    if list(plain) == list(drafted):
        return None
    shared = min(len(plain), len(drafted))
    position = next((i for i in range(shared) if plain[i] != drafted[i]), shared)
    in_plain, in_drafted = position < len(plain), position < len(drafted)
    return Difference(
        prompt=prompt,
        position=position,
        plain_token=plain[position] if in_plain else None,
        drafted_token=drafted[position] if in_drafted else None,
        plain_gap=plain_gaps[position] if in_plain else None,
        drafted_gap=drafted_gaps[position] if in_drafted else None,
    )


def rate_positions(passes: Sequence[VerifyPass], draft_tokens: int) -> tuple[PositionRate, ...]:
    """Acceptance of each of the `draft_tokens` positions over a number of decode passes."""
    return tuple(
        PositionRate(
            position=j,
            judged=sum(one.judged > j for one in passes),
            reached=sum(one.judged > j and one.accepted >= j for one in passes),
            accepted=sum(one.judged > j and one.accepted > j for one in passes),
        )
        for j in range(draft_tokens)
    )


def summarise(outcomes: Sequence[Outcome], *, draft_tokens: int) -> Acceptance:
    """Adds up the prompts of a run.

    tokens_per_pass[i] is the number of decode passes that emitted i + 1 tokens.
    EvaluationError when no prompt needed a decode pass: there is then nothing to measure.
    """
    passes = [one for outcome in outcomes for one in outcome.passes]
    if not passes:
        raise EvaluationError(
            f"{len(outcomes)} prompts and not one decode pass",
            wanted="prompts whose answers are longer than one token",
            next_step="raise evaluate.max_new_tokens or give more held-out prompts",
        )
    return Acceptance(
        prompts=len(outcomes),
        identical=sum(outcome.difference is None for outcome in outcomes),
        draft_tokens=draft_tokens,
        tokens=sum(one.emitted for one in passes),
        passes=len(passes),
        plain_passes=sum(outcome.plain_passes for outcome in outcomes),
        positions=rate_positions(passes, draft_tokens),
        tokens_per_pass=tuple(
            sum(one.emitted == i + 1 for one in passes) for i in range(draft_tokens + 1)
        ),
        plain_seconds=sum(outcome.plain_seconds for outcome in outcomes),
        drafted_seconds=sum(outcome.drafted_seconds for outcome in outcomes),
        plain_prefill_seconds=sum(outcome.plain_prefill_seconds for outcome in outcomes),
        drafted_prefill_seconds=sum(outcome.drafted_prefill_seconds for outcome in outcomes),
        first_difference=next((o.difference for o in outcomes if o.difference is not None), None),
    )
