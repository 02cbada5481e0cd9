import json
from pathlib import Path

import pytest
import torch

from pipeline.draft.ttt import StepMetrics
from pipeline.training.metrics import MetricsLog, acceptance_length, summary


def line(step: int, kind: str = "step") -> dict[str, object]:
    return {"event": kind, "step": step, "loss": 1.0, "accuracy": [0.5, None]}


def steps(output: Path) -> list[tuple[str, int]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [(value["event"], value["step"]) for value in map(json.loads, lines)]


def test_rates_by_hand():
    sums = torch.tensor([[4, 2], [2, 1], [3, 1], [1, 0], [6, 5]], dtype=torch.float64)
    found = summary(StepMetrics.from_tensor(sums))
    assert found["accuracy"] == [0.5, 0.5]
    assert found["acceptance_length"] == 1.75
    assert found["overlap"] == [0.75, 0.5]
    assert found["outside"] == [0.25, 0.0]
    assert found["loss_by_step"] == [1.5, 2.5]
    assert found["count"] == [4, 2]


@pytest.mark.parametrize(
    ("accuracy", "length"), [([None, None], None), ([0.5, None], 1.5), ([1.0, 1.0, 1.0], 4.0)]
)
def test_acceptance_length_of_known_steps_only(accuracy, length):
    assert acceptance_length(accuracy) == length


def test_a_resumed_log_drops_later_steps_and_a_cut_line(tmp_path: Path):
    log = MetricsLog(tmp_path, resumed_at=0)
    for event in (line(0, "evaluation"), line(1), line(2), line(2, "evaluation"), line(3)):
        log.write(event)
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    log = MetricsLog(tmp_path, resumed_at=2)
    assert log.kept_steps == 2
    log.write(line(3))
    log.close()
    assert steps(tmp_path) == [
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("step", 3),
    ]


def test_a_new_run_starts_an_empty_log(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "step": 1}\n')
    MetricsLog(tmp_path, resumed_at=0).close()
    assert steps(tmp_path) == []


def test_tensorboard_gets_the_same_numbers(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, resumed_at=0)
    log.write(line(1))
    log.write(line(1, "evaluation"))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == [
        "held_out/accuracy/0",
        "held_out/loss",
        "train/accuracy/0",
        "train/loss",
    ]
    assert events.Scalars("train/accuracy/0")[0].value == 0.5
