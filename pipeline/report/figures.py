"""The page's interactive charts, as plotly figures on clear backgrounds that suit both themes."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from pipeline.evaluation.acceptance import Acceptance
from pipeline.report import colours
from pipeline.report.facts import Boundary, TrainingFacts
from pipeline.report.series import Curve, accuracy_curve, loss_curve, smooth, thin, ttt_steps


def _styled(figure: Any, *, x: str, y: str, height: int = 340) -> Any:
    """Gives a figure the page's look; x and y are the axis titles."""
    axis = {"gridcolor": colours.GRID, "zeroline": False, "linecolor": colours.GRID}
    figure.update_traces(marker_line_width=0, selector={"type": "bar"})
    figure.update_layout(
        height=height,
        margin={"l": 60, "r": 16, "t": 12, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": colours.INK},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        hovermode="x unified",
        hoverlabel={"bgcolor": "#20252b", "font": {"color": "#f2f4f6"}},
        xaxis={**axis, "title": {"text": x, "font": {"size": 13}}},
        yaxis={**axis, "title": {"text": y, "font": {"size": 13}}},
    )
    return figure


def _line(curve: Curve, name: str, colour: str, **extra: Any) -> Any:
    drawn = thin(curve)
    return go.Scatter(x=list(drawn.x), y=list(drawn.y), name=name, line_color=colour, **extra)


def records_figure(boundaries: Sequence[Boundary]) -> Any:
    """Kept and skipped of each stage, one stacked bar a stage."""
    names = [f"{b.stage} ({b.unit})" for b in boundaries]
    figure = go.Figure(
        [
            go.Bar(
                y=names,
                x=[b.kept for b in boundaries],
                name="kept",
                orientation="h",
                marker_color=colours.KEPT,
            ),
            go.Bar(
                y=names,
                x=[b.skipped_total for b in boundaries],
                name="skipped",
                orientation="h",
                marker_color=colours.SKIPPED,
            ),
        ]
    )
    figure = _styled(figure, x="count", y="", height=130 + 44 * len(boundaries))
    figure.update_layout(barmode="stack", hovermode="y unified")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def loss_figure(training: TrainingFacts) -> Any:
    """Loss by step: train as a line (smoothed when long), held-out with markers."""
    figure = go.Figure()
    if training.steps:
        curve = smooth(loss_curve(training.steps))
        figure.add_trace(_line(curve, "train", colours.TRAIN, mode="lines"))
    if training.held_out:
        curve = loss_curve(training.held_out)
        figure.add_trace(_line(curve, "held-out", colours.HELD_OUT, mode="lines+markers"))
    return _styled(figure, x="optimizer step", y="loss")


def accuracy_figure(training: TrainingFacts) -> Any:
    """Top-1 accuracy of each TTT step: train thin, held-out with markers, one colour a TTT step."""
    figure = go.Figure()
    for k in range(ttt_steps(training.steps)):
        curve = smooth(accuracy_curve(training.steps, k))
        extra = {"mode": "lines", "opacity": 0.55, "line_width": 1.5}
        figure.add_trace(_line(curve, f"train, step {k}", colours.series(k), **extra))
    for k in range(ttt_steps(training.held_out)):
        curve = accuracy_curve(training.held_out, k)
        extra = {"mode": "lines+markers", "line_width": 2.5}
        figure.add_trace(_line(curve, f"held-out, step {k}", colours.series(k), **extra))
    figure = _styled(figure, x="optimizer step", y="top-1 accuracy")
    figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    return figure


def position_figure(acceptance: Acceptance) -> Any:
    """Acceptance of each draft position, conditional and unconditional."""
    names = [f"draft {rate.position + 1}" for rate in acceptance.positions]
    bars = [
        go.Bar(
            x=names,
            y=values,
            name=name,
            marker_color=colour,
            text=["" if value is None else f"{value:.0%}" for value in values],
        )
        for name, colour, values in (
            (
                "given the earlier ones were accepted",
                colours.CONDITIONAL,
                [rate.conditional for rate in acceptance.positions],
            ),
            (
                "of all passes",
                colours.UNCONDITIONAL,
                [rate.unconditional for rate in acceptance.positions],
            ),
        )
    ]
    figure = _styled(go.Figure(bars), x="", y="accepted", height=320)
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    return figure


def pass_figure(acceptance: Acceptance) -> Any:
    """Share of decode passes by the number of tokens they emitted."""
    shares = [count / acceptance.passes for count in acceptance.tokens_per_pass]
    bar = go.Bar(
        x=[str(i + 1) for i in range(len(shares))],
        y=shares,
        marker_color=colours.KEPT,
        text=[f"{share:.0%}" for share in shares],
        name="passes",
    )
    figure = _styled(
        go.Figure([bar]), x="tokens emitted by a pass", y="share of passes", height=320
    )
    figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    return figure
