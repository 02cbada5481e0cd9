"""Results of attempts: one row for each use that an attempt measured."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.nccl.attempt import Attempt, Status
from pipeline.nccl.cases import Case

DEFAULT = "default"


@dataclass(frozen=True)
class Measured:
    """One case of one attempt; times are of one message. spread: of the middle half, as a share."""

    case: str
    weight: float
    median_seconds: float
    p95_seconds: float
    spread: float
    bus_bytes_per_second: float
    samples: int


@dataclass(frozen=True)
class Row:
    """One attempt with one environment, as one use sees it. launch: 0, or 1 for its repetition.

    code and detail say what went wrong; cases are those measured before it.
    """

    use: str
    environment: dict[str, str]
    launch: int
    status: Status
    code: str | None
    detail: str
    wall_seconds: float
    cases: tuple[Measured, ...]

    @property
    def name(self) -> str:
        """As tables call its environment."""
        return name_of(self.environment)

    @property
    def score(self) -> float:
        """Weighted geometric mean of the medians, seconds: one size's unit is as good as another's.

        Twice as fast at a size of weight w counts alike wherever it is.
        """
        weights = sum(case.weight for case in self.cases)
        logs = (case.weight * math.log(case.median_seconds) for case in self.cases)
        return math.exp(sum(logs) / weights)

    @property
    def spread(self) -> float:
        """Weighted mean of the cases' spreads."""
        weights = sum(case.weight for case in self.cases)
        return sum(case.weight * case.spread for case in self.cases) / weights

    def to_json(self) -> dict[str, Any]:
        """For the file."""
        return {**asdict(self), "candidate": self.name}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Row":
        """KeyError or TypeError when it is none."""
        fields = {key: item for key, item in value.items() if key != "candidate"}
        return cls(**{**fields, "cases": tuple(Measured(**case) for case in fields["cases"])})


def name_of(environment: Mapping[str, str]) -> str:
    """`PROTO=LL MIN_NCHANNELS=8`; `default` for none."""
    pairs = (f"{name.removeprefix('NCCL_')}={value}" for name, value in environment.items())
    return " ".join(pairs) or DEFAULT


def rows_of(
    attempt: Attempt,
    cases: Iterable[Case],
    *,
    uses: Sequence[str],
    environment: Mapping[str, str],
    launch: int,
    world: int,
) -> list[Row]:
    """Rows of the uses that the attempt reached; a use behind the one that failed has none."""
    cases = list(cases)
    stopped = next((case.use for case in cases if case.key == attempt.at), None)
    found = []
    for use in uses:
        failed_here = attempt.status != "ok" and stopped in (use, None)
        found.append(
            Row(
                use=use,
                environment=dict(environment),
                launch=launch,
                status=attempt.status if failed_here else "ok",
                code=attempt.code if failed_here else None,
                detail=attempt.detail if failed_here else "",
                wall_seconds=round(attempt.wall_seconds, 2),
                cases=tuple(
                    _measured(case, attempt.seconds[case.key], world=world)
                    for case in cases
                    if case.use == use and case.key in attempt.seconds
                ),
            )
        )
        if use == stopped:
            break
    return found


def _measured(case: Case, seconds: Sequence[float], *, world: int) -> Measured:
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Measured(
        case=case.name,
        weight=case.weight,
        median_seconds=median,
        p95_seconds=ordered[math.ceil(0.95 * len(ordered)) - 1],
        spread=(high - low) / median,
        bus_bytes_per_second=case.bus_bytes(world) / median,
        samples=len(ordered),
    )
