from pathlib import Path

import pytest

from pipeline.training.errors import RequestError
from pipeline.training.request import TrainRequest

BASE = {"dataset": Path("d"), "target": Path("t"), "output": Path("o"), "drafter": {"taps": [1]}}


def request(**changes: object) -> TrainRequest:
    return TrainRequest(**{**BASE, "draft_vocabulary": Path("v"), **changes})  # type: ignore[arg-type]


def test_a_request_survives_json():
    asked = request(warm_start=Path("w"), betas=(0.8, 0.9), epochs=7)
    assert TrainRequest.from_json(asked.to_json()) == asked


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("epochs", 0),
        ("decay", 0.0),
        ("decay", 1.1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("warmup_share", 1.0),
        ("final_learning_rate_share", 1.5),
        ("betas", (0.9, 1.0)),
        ("clip_norm", -1.0),
        ("tokens_per_step", 100),
        ("loss", "mse"),
        ("compute_dtype", "float16"),
        ("reduce_dtype", "float16"),
        ("device", "tpu"),
        ("draft_vocabulary", None),
        ("keep_checkpoints", 0),
    ],
)
def test_an_impossible_value_is_refused_by_name(name: str, value: object):
    with pytest.raises(RequestError, match=name):
        request(**{name: value})


@pytest.mark.parametrize("change", [{"stepz": 3}, {"epochs": "three"}])
def test_json_that_is_no_request_is_refused(change: dict[str, object]):
    with pytest.raises(RequestError):
        TrainRequest.from_json({**request().to_json(), **change})


def test_where_a_run_works_is_no_part_of_its_mathematics():
    here, there = request(), request(output=Path("p"), threads=2, resume=True, dataset=Path("e"))
    assert here.mathematics() == there.mathematics()


@pytest.mark.parametrize("change", [{"decay": 0.7}, {"reduce_dtype": "bfloat16"}])
def test_what_changes_what_is_learned_is_part_of_it(change: dict[str, object]):
    assert request().mathematics() != request(**change).mathematics()
