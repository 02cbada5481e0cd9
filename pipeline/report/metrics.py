"""Training curves out of the lines that the train stage wrote."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.report.errors import ReportError
from pipeline.report.facts import StepPoint, TrainingFacts


def read_training(path: Path) -> TrainingFacts:
    """Curves of a run's metrics.jsonl. ReportError names a line that cannot be read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    events = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            events.append(json.loads(line))
        except ValueError as error:
            raise _unreadable(path, f"line {number}: {error}") from error
    try:
        return training_facts(events)
    except (KeyError, TypeError) as error:
        raise _unreadable(path, f"an event without {error}") from error


def training_facts(events: Iterable[Mapping[str, Any]]) -> TrainingFacts:
    """Curves out of `step` and `evaluation` events, in order; other events are left out.

    Steps without a supervised token (loss None or not updated) have no loss to draw. KeyError when
    a key is missing.
    """
    steps: list[StepPoint] = []
    held_out: list[StepPoint] = []
    for event in events:
        if event["event"] not in {"step", "evaluation"}:
            continue
        if event["loss"] is None or not event.get("updated", True):
            continue
        point = StepPoint(
            step=event["step"],
            epoch=event["epoch"],
            loss=event["loss"],
            accuracy=tuple(event["accuracy"]),
            acceptance_length=event["acceptance_length"],
            learning_rate=event.get("learning_rate"),
        )
        (steps if event["event"] == "step" else held_out).append(point)
    return TrainingFacts(tuple(steps), tuple(held_out))


def _unreadable(path: Path, found: str) -> ReportError:
    return ReportError(
        f"{path}: {found}",
        wanted="one JSON event a line, as training writes them",
        next_step="make train",
    )
