"""The results as a markdown table: the faster form of each trainer, and every failure."""

from collections.abc import Iterable
from typing import Any

HEAD = (
    "shape", "T", "TTT", "supervised", "trainer", "form", "ms a step", "tokens/s",
    "ours / it", "peak GiB", "of the ceiling", "first step, s", "remarks",
)  # fmt: skip
KEY = ("shape", "tokens", "steps", "supervised")

_REASON = 160
"""Letters of a failure in the table."""


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    """What a line is compared within."""
    return tuple(result["case"][name] for name in KEY)


def faster(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result a trainer and case: its fastest form, or all its failures when none ran."""
    chosen: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        chosen.setdefault((*key_of(result), result["trainer"]), []).append(result)
    kept = []
    for tried in chosen.values():
        ran = [result for result in tried if "milliseconds" in result]
        if not ran:
            kept += tried
            continue
        best = min(ran, key=lambda result: result["milliseconds"])
        others = [other_form(result) for result in tried if result is not best]
        kept.append(best | {"others": others})
    return kept


def other_form(result: dict[str, Any]) -> str:
    """A form that was not the fastest, in a few words."""
    form = result["case"]["form"]
    if "failure" in result:
        return f"{form}: {result['failure']}"
    return f"{form}: {result['tokens_per_second']:,} tokens/s"


def cells(result: dict[str, Any], ours: dict[str, Any] | None) -> list[str]:
    """One line of the table."""
    case, ran = result["case"], "milliseconds" in result
    name = f"{result['trainer']} {result.get('version', '')}".strip()
    start = [case["shape"], str(case["tokens"]), str(case["steps"]), str(case["supervised"]), name]
    if not ran:
        reason = result["failure"]
        shown = reason if len(reason) <= _REASON else reason[:_REASON] + " ... (whole in the logs)"
        return [*start, case["form"], *["-"] * 6, f"failed: {shown}"]
    remarks = [result.get("note", ""), *result.get("others", ())]
    ratio = "-" if ours is None else f"{result['milliseconds'] / ours['milliseconds']:.2f}"
    return [
        *start,
        case["form"],
        f"{result['milliseconds']:.1f}",
        f"{result['tokens_per_second']:,}",
        ratio,
        "-" if result["peak_gib"] is None else f"{result['peak_gib']:.1f}",
        f"{100 * result['share_of_ceiling']:.1f} %",
        f"{result['first_step_seconds']:.0f}",
        "; ".join(remark for remark in remarks if remark),
    ]


def markdown(results: list[dict[str, Any]]) -> str:
    """The table, cases in order of first appearance."""
    kept = faster(results)
    ours = {
        key_of(result): result
        for result in kept
        if result["trainer"] == "ours" and "milliseconds" in result
    }
    order = {key: at for at, key in reversed(list(enumerate(map(key_of, kept))))}
    lines = [cells(r, ours.get(key_of(r))) for r in sorted(kept, key=lambda r: order[key_of(r)])]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rows = [HEAD, ["---"] * len(HEAD), *escaped]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
