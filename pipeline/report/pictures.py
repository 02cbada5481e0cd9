"""The same charts as PNG bytes, drawn without a display or a browser."""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.evaluation.acceptance import Acceptance
from pipeline.report import colours
from pipeline.report.facts import Boundary, TrainingFacts
from pipeline.report.series import accuracy_curve, loss_curve, smooth, ttt_steps

_DPI = 144


def _canvas(title: str, *, x: str, y: str, height: float = 4.2) -> tuple[Figure, Axes]:
    """A white figure with one plot; sizes in inches. pyplot's global state is not used."""
    figure = Figure(figsize=(8, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def records_picture(boundaries: Sequence[Boundary]) -> bytes:
    """Kept and skipped of each stage."""
    height = 1.6 + 0.5 * len(boundaries)
    figure, axes = _canvas("Read = kept + skipped", x="count", y="", height=height)
    names = [f"{b.stage} ({b.unit})" for b in boundaries]
    kept = [b.kept for b in boundaries]
    axes.barh(names, kept, color=colours.KEPT, label="kept")
    skipped = [b.skipped_total for b in boundaries]
    axes.barh(names, skipped, left=kept, color=colours.SKIPPED, label="skipped")
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _png(figure)


def loss_picture(training: TrainingFacts) -> bytes:
    """Loss by optimizer step, train and held-out."""
    figure, axes = _canvas("Loss", x="optimizer step", y="loss")
    if training.steps:
        curve = smooth(loss_curve(training.steps))
        axes.plot(curve.x, curve.y, color=colours.TRAIN, label="train")
    if training.held_out:
        curve = loss_curve(training.held_out)
        axes.plot(curve.x, curve.y, "o-", color=colours.HELD_OUT, label="held-out")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:
        axes.legend(frameon=False)
    return _png(figure)


def accuracy_picture(training: TrainingFacts) -> bytes:
    """Top-1 accuracy of each TTT step, train and held-out."""
    figure, axes = _canvas("Top-1 accuracy by TTT step", x="optimizer step", y="accuracy")
    for k in range(ttt_steps(training.steps)):
        curve = smooth(accuracy_curve(training.steps, k))
        label = f"train, step {k}"
        axes.plot(curve.x, curve.y, color=colours.series(k), alpha=0.5, lw=1, label=label)
    for k in range(ttt_steps(training.held_out)):
        curve = accuracy_curve(training.held_out, k)
        label = f"held-out, step {k}"
        axes.plot(curve.x, curve.y, "o-", color=colours.series(k), lw=2, label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:
        axes.legend(frameon=False, ncols=2, fontsize=9)
    return _png(figure)


def acceptance_picture(acceptance: Acceptance) -> bytes:
    """Acceptance of each draft position; the title carries the measured acceptance length."""
    title = f"Acceptance by position (acceptance length {acceptance.acceptance_length:.2f})"
    figure, axes = _canvas(title, x="draft position", y="accepted")
    conditional = [rate.conditional or 0.0 for rate in acceptance.positions]
    unconditional = [rate.unconditional or 0.0 for rate in acceptance.positions]
    places = [rate.position + 1 for rate in acceptance.positions]
    for shift, values, colour, label in (
        (-0.2, conditional, colours.CONDITIONAL, "given the earlier ones were accepted"),
        (0.2, unconditional, colours.UNCONDITIONAL, "of all passes"),
    ):
        bars = axes.bar([p + shift for p in places], values, 0.38, color=colour, label=label)
        axes.bar_label(bars, labels=[f"{value:.0%}" for value in values], fontsize=9, padding=2)
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return _png(figure)
