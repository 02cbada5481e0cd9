"""Training curves out of the lines that the train stage wrote."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.report.errors import ReportError
from pipeline.report.facts import StepPoint, TrainingFacts
from pipeline.settings.strict_json import parse_json, read_plain

_MOST = 1e30  # sums and pictures work with all that is less
_MOST_BYTES = 1 << 30  # a step has some 500


def read_training(path: Path) -> TrainingFacts:
    """Curves of a run's metrics.jsonl. ReportError names a line that cannot be read."""
    try:
        text = read_plain(path, most_bytes=_MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    events = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            events.append(parse_json(line))
        except ValueError as error:
            raise _unreadable(path, f"line {number}: {error}") from error
    try:
        return training_facts(events)
    except KeyError as error:
        raise _unreadable(path, f"an event without {error}") from error
    except TypeError as error:
        raise _unreadable(path, f"an event of another shape: {error}") from error


def training_facts(events: Iterable[Mapping[str, Any]]) -> TrainingFacts:
    """Curves out of `step` and `evaluation` events, in order; other events are left out.

    Steps without a supervised token (loss None or not updated) have no loss to draw. KeyError when
    a key is missing, TypeError when a value is of another kind.
    """
    steps: list[StepPoint] = []
    held_out: list[StepPoint] = []
    for event in events:
        if event["event"] not in {"step", "evaluation"}:
            continue
        if event["loss"] is None or not event.get("updated", True):
            continue
        point = StepPoint(
            step=int(_number(event["step"])),
            epoch=_number(event["epoch"]),
            loss=_number(event["loss"]),
            accuracy=tuple(map(_rate, event["accuracy"])),
            acceptance_length=_rate(event["acceptance_length"]),
            learning_rate=_rate(event.get("learning_rate")),
        )
        (steps if event["event"] == "step" else held_out).append(point)
    return TrainingFacts(tuple(steps), tuple(held_out))


def _number(value: Any) -> float:
    # Not of NaN either: it is less than nothing.
    if type(value) not in (int, float) or not abs(value) < _MOST:
        raise TypeError(f"{str(value)[:40]!r} in place of a number")
    return float(value)


def _rate(value: Any) -> float | None:
    return None if value is None else _number(value)


def _unreadable(path: Path, found: str) -> ReportError:
    return ReportError(
        f"{path}: {found}",
        wanted="one JSON event a line, as training writes them",
        next_step="make train",
    )
