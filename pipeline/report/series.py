"""Series for drawing: what a curve or a bar shows, before anything draws it."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.facts import Boundary, StepPoint

_SMOOTHED_FROM = 60
_POINTS_DRAWN = 1500


@dataclass(frozen=True)
class Curve:
    """x and y of one line, of the same length."""

    x: tuple[float, ...]
    y: tuple[float, ...]


def thin(curve: Curve, limit: int = _POINTS_DRAWN) -> Curve:
    """At most about `limit` points, evenly picked, first and last kept: a page stays a few MB."""
    if len(curve.x) <= limit:
        return curve
    picked = sorted({round(i * (len(curve.x) - 1) / (limit - 1)) for i in range(limit)})
    return Curve(tuple(curve.x[i] for i in picked), tuple(curve.y[i] for i in picked))


def smooth(curve: Curve) -> Curve:
    """A centred running mean over 1/30 of a long curve; a short one as it is."""
    n = len(curve.y)
    if n < _SMOOTHED_FROM:
        return curve
    half = max(1, n // 60)
    sums = [0.0]
    for value in curve.y:
        sums.append(sums[-1] + value)
    spans = [(max(0, i - half), min(n, i + half + 1)) for i in range(n)]
    return Curve(curve.x, tuple((sums[b] - sums[a]) / (b - a) for a, b in spans))


def loss_curve(points: Sequence[StepPoint]) -> Curve:
    """Loss by optimizer step."""
    return Curve(tuple(p.step for p in points), tuple(p.loss for p in points))


def accuracy_curve(points: Sequence[StepPoint], ttt_step: int) -> Curve:
    """Top-1 accuracy of one TTT step by optimizer step; points without one are left out."""
    pairs = [(p.step, p.accuracy[ttt_step]) for p in points if len(p.accuracy) > ttt_step]
    have = [(step, rate) for step, rate in pairs if rate is not None]
    return Curve(tuple(step for step, _ in have), tuple(rate for _, rate in have))


def ttt_steps(points: Sequence[StepPoint]) -> int:
    """How many TTT steps the points measure."""
    return max((len(p.accuracy) for p in points), default=0)


def skip_reasons(boundaries: Sequence[Boundary]) -> tuple[tuple[str, str, int], ...]:
    """(stage, reason, count), the most frequent first within each stage; zeros left out."""
    return tuple(
        (boundary.stage, reason, count)
        for boundary in boundaries
        for reason, count in sorted(boundary.skipped.items(), key=lambda item: (-item[1], item[0]))
        if count
    )
