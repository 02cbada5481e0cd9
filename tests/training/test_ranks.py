import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.training.checkpoint import newest_complete
from pipeline.training.errors import TrainingError
from pipeline.training.loop import train
from pipeline.training.ranks import Ranks, join_ranks
from pipeline.training.request import TrainRequest
from pipeline.training.start import start_run

ALONE = Ranks(0, 1, torch.device("cpu"))


def start(request: TrainRequest, folder: Path, *, ranks: int) -> tuple[int, list[dict[str, Any]]]:
    """Runs the worker under torchrun; gives the exit status and what rank 0 said."""
    file = folder / f"request-{ranks}.json"
    file.write_text(json.dumps(request.to_json()))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", "-m", "pipeline.training.worker", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def of_kind(events: list[dict[str, Any]], kind: str, key: str) -> list[Any]:
    return [event[key] for event in events if event["event"] == kind]


def test_two_ranks_train_as_one(ask, tmp_path):
    # Three packs a step: the ranks' shares are uneven.
    one = ask(output=tmp_path / "one", tokens_per_step=120, checkpoint_every_steps=1)
    two = replace(one, output=tmp_path / "two")
    alone: list[dict[str, Any]] = []
    train(one, lambda event: alone.append(dict(event)))
    status, together = start(two, tmp_path, ranks=2)
    assert status == 0
    assert together[0]["world"] == 2
    for key in ("loss", "gradient_norm", "weight", "tokens"):
        assert of_kind(together, "step", key) == pytest.approx(
            of_kind(alone, "step", key), rel=1e-4
        )
    assert of_kind(together, "evaluation", "loss") == pytest.approx(
        of_kind(alone, "evaluation", "loss"), rel=1e-4
    )
    ends = [newest_complete(r.output / "checkpoints")[0] for r in (one, two)]
    left, right = (end.model()[0] for end in ends if end is not None)
    for name, tensor in left.items():
        assert torch.allclose(tensor, right[name], rtol=1e-3, atol=1e-4), name


def test_a_failing_rank_ends_all_with_its_own_words(ask, sample, tmp_path):
    samples = [sample(40, tuple(range(20, 40))) for _ in range(7)]
    request = ask([*samples, sample(40, tuple(range(20, 40)), poison=True)])
    # Each sample fills a pack, two packs make a step: the bad one is to be the second of its step.
    seed = next(
        seed
        for seed in range(50)
        if start_run(replace(request, seed=seed), ALONE)[0].plan.epoch(0).order.tolist().index(7)
        % 2
    )
    request = replace(request, seed=seed)
    status, events = start(request, tmp_path, ranks=2)
    assert status != 0
    assert events[-1]["event"] == "error"
    assert events[-1]["message"].startswith("rank 1: step ")
    assert "the pack of samples c-7" in events[-1]["message"]
    assert "weights were not touched" in events[-1]["wanted"]


def test_alone_a_process_is_rank_0_of_1():
    with join_ranks("cpu") as ranks:
        assert (ranks.rank, ranks.world, ranks.device.type) == (0, 1, "cpu")


def test_an_error_of_a_part_says_what_was_being_done():
    def work() -> None:
        raise ValueError("seven")

    with pytest.raises(TrainingError, match="step 3: ValueError: seven") as caught:
        ALONE.together(work, doing="step 3")
    assert isinstance(caught.value.__cause__, ValueError)
