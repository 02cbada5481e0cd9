"""Writes the report: one HTML file that needs nothing beside it, and the charts as PNG."""

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import plotly.io
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from pipeline.report import figures, pictures
from pipeline.report.facts import ReportFacts
from pipeline.report.series import skip_reasons
from pipeline.slate.files import write_atomic

PAGE_NAME = "report.html"

_CHART_CONFIG = {"displayModeBar": False, "responsive": True}


def _share(value: float | None) -> str:
    """A ratio as per cent, a dash where there is none."""
    return "–" if value is None else f"{value:.1%}"  # noqa: RUF001  a real dash in a table cell


def _number(value: float | None, digits: int = 2) -> str:
    """A decimal with a fixed number of digits, a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"  # noqa: RUF001


def _count(value: int) -> str:
    """A whole number with thin thousands separators."""
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _chart(figure: Any, name: str) -> Markup:
    """One figure as a div and its script; plotly escapes <, > and / in the data."""
    html = plotly.io.to_html(
        figure,
        config=_CHART_CONFIG,
        include_plotlyjs=False,  # once for all charts, in the head
        full_html=False,
        div_id=f"chart-{name}",  # the default is random: the same facts give the same bytes
        default_height=f"{figure.layout.height}px",
    )
    return Markup(html)  # noqa: S704


def _charts(facts: ReportFacts) -> dict[str, Markup]:
    """Every chart the facts allow, by name."""
    made: dict[str, Any] = {}
    if facts.boundaries:
        made["records"] = figures.records_figure(facts.boundaries)
    if facts.training:
        made["loss"] = figures.loss_figure(facts.training)
        made["accuracy"] = figures.accuracy_figure(facts.training)
    if facts.acceptance:
        made["positions"] = figures.position_figure(facts.acceptance)
        made["passes"] = figures.pass_figure(facts.acceptance)
    return {name: _chart(figure, name) for name, figure in made.items()}


def render_page(facts: ReportFacts) -> str:
    """The whole page as text. The same facts give the same text."""
    room = resources.files("pipeline.report")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(lambda name: room.joinpath(name).read_text("utf-8")),
    )
    environment.filters.update(share=_share, number=_number, count=_count, duration=_duration)
    charts = _charts(facts)
    return environment.get_template("page.html.j2").render(
        facts=facts,
        charts=charts,
        reasons=skip_reasons(facts.boundaries),
        plotly_script=Markup(get_plotlyjs()) if charts else "",  # noqa: S704  the library's own
    )


def render_pictures(facts: ReportFacts) -> dict[str, bytes]:
    """PNG bytes by file name, for every chart the facts allow."""
    made: dict[str, bytes] = {}
    if facts.boundaries:
        made["records.png"] = pictures.records_picture(facts.boundaries)
    if facts.training:
        made["loss.png"] = pictures.loss_picture(facts.training)
        made["accuracy.png"] = pictures.accuracy_picture(facts.training)
    if facts.acceptance:
        made["acceptance.png"] = pictures.acceptance_picture(facts.acceptance)
    return made


def write_report(
    out: Path, facts: ReportFacts, *, advance: Callable[[int], None] = lambda _: None
) -> list[Path]:
    """Writes `report.html` and the PNGs into the folder `out`, which must exist.

    Gives the files written, the page first. advance is called with 1 after each file. OSError as
    the system gives it; a file is there whole or not at all.
    """
    files = {PAGE_NAME: render_page(facts).encode(), **render_pictures(facts)}
    written = []
    for name, data in files.items():
        write_atomic(out / name, data)
        written.append(out / name)
        advance(1)
    return written
