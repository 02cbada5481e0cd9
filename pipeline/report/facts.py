"""The facts a report is made of: plain data, gathered by the stage.

Nothing here is computed from files; a part that has not been run is None or empty and the page says
so. What must add up is checked when the facts are made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pipeline.evaluation.acceptance import Acceptance
from pipeline.report.errors import ReportError


@dataclass(frozen=True)
class Boundary:
    """What went into one stage and what came out: read = kept + skipped.

    unit: what is counted ("records", "samples"). skipped: count by reason code.
    ReportError when the three do not add up.
    """

    stage: str
    unit: str
    read: int
    kept: int
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.read != self.kept + self.skipped_total:
            raise ReportError(
                f"stage {self.stage}: {self.read} {self.unit} read, {self.kept} kept, "
                f"{self.skipped_total} skipped",
                wanted="read = kept + skipped",
                next_step=f"make {self.stage}",
            )

    @property
    def skipped_total(self) -> int:
        """Skipped for any reason."""
        return sum(self.skipped.values())


@dataclass(frozen=True)
class Split:
    """Size of one split of the dataset; supervised_tokens are those the loss counts."""

    name: str
    samples: int
    tokens: int
    supervised_tokens: int


@dataclass(frozen=True)
class StepPoint:
    """One optimizer step, or one evaluation after `step` steps.

    loss: weighted mean a supervised (row, TTT step) pair. accuracy: top-1 of each TTT step, in
    target ids, None where a TTT step has no label. acceptance_length: estimated,
    1 + a_0 + a_0 a_1 + ...
    """

    step: int
    epoch: float
    loss: float
    accuracy: tuple[float | None, ...]
    acceptance_length: float | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class TrainingFacts:
    """Curves of a training run: one point a step, and the held-out evaluations in step order."""

    steps: tuple[StepPoint, ...]
    held_out: tuple[StepPoint, ...]


@dataclass(frozen=True)
class Piece:
    """A stretch of a sample's text that is supervised throughout, or not at all."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class SampleText:
    """One sample, decoded; pieces in order."""

    id: str
    split: str
    tokens: int
    supervised_tokens: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StageRun:
    """One sealed stage: duration and the digest of its manifest."""

    name: str
    seconds: float
    manifest_digest: str
    sealed_at: str


@dataclass(frozen=True)
class ReportFacts:
    """Everything the page shows. profile, target, version: as printed. made_at: ISO 8601.

    settings: (key, value, origin) as `make show` prints them. host, versions: (name, value) lines.
    """

    run: str
    profile: str
    target: str
    version: str
    made_at: str
    boundaries: tuple[Boundary, ...] = ()
    splits: tuple[Split, ...] = ()
    training: TrainingFacts | None = None
    acceptance: Acceptance | None = None
    samples: tuple[SampleText, ...] = ()
    stages: tuple[StageRun, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    host: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()


def split_pieces(
    input_ids: Sequence[int],
    supervised: Sequence[bool],
    *,
    decode: Callable[[list[int]], str],
) -> tuple[Piece, ...]:
    """Cuts a sample where the supervised mask changes and decodes each stretch.

    input_ids and supervised have the same length (ValueError otherwise). decode keeps special
    tokens; stretches start and end at turn borders, so no character is cut in two.
    """
    runs = groupby(zip(input_ids, supervised, strict=True), key=lambda pair: bool(pair[1]))
    return tuple(Piece(decode([int(token) for token, _ in run]), mark) for mark, run in runs)


def sample_text(
    sample_id: str,
    split: str,
    *,
    input_ids: Sequence[int],
    supervised: Sequence[bool],
    decode: Callable[[list[int]], Any],
) -> SampleText:
    """A sample ready for the page; arguments as `split_pieces` takes them."""
    return SampleText(
        id=sample_id,
        split=split,
        tokens=len(input_ids),
        supervised_tokens=sum(map(bool, supervised)),
        pieces=split_pieces(input_ids, supervised, decode=decode),
    )
