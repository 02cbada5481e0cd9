import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.errors import ReportError
from pipeline.report.facts import StepPoint
from pipeline.report.metrics import read_training

EVALUATION: dict[str, Any] = {
    "event": "evaluation",
    "step": 0,
    "epoch": 0,
    "loss": 9.0,
    "accuracy": [0.1, None],
    "acceptance_length": 1.1,
}
STEP = {**EVALUATION, "event": "step", "step": 1, "learning_rate": 1e-4, "updated": True}


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_steps_and_evaluations_become_two_curves(tmp_path: Path) -> None:
    facts = read_training(write(tmp_path / "metrics.jsonl", EVALUATION, STEP))
    assert facts.held_out == (StepPoint(0, 0, 9.0, (0.1, None), 1.1),)
    assert facts.steps == (StepPoint(1, 0, 9.0, (0.1, None), 1.1, 1e-4),)


@pytest.mark.parametrize("change", [{"updated": False, "loss": 0.0}, {"loss": None}])
def test_a_step_that_had_nothing_to_learn_is_not_drawn(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    assert read_training(write(tmp_path / "m.jsonl", {**STEP, **change})).steps == ()


def test_a_cut_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(STEP) + '\n{"event": "st')
    with pytest.raises(ReportError, match=r"metrics\.jsonl: line 2"):
        read_training(path)


def test_an_event_that_lacks_a_key_is_named(tmp_path: Path) -> None:
    lacking = {name: value for name, value in STEP.items() if name != "accuracy"}
    with pytest.raises(ReportError, match="without 'accuracy'"):
        read_training(write(tmp_path / "m.jsonl", lacking))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="FileNotFoundError"):
        read_training(tmp_path / "absent.jsonl")
