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
from tests.training import rank_cases
from tests.training.rank_cases import distance, equal, load

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Trained by `rank_cases` on 1 rank and on 2, each going on from halves of both."""
    folder = tmp_path_factory.mktemp("made")
    rank_cases.packs(ALONE, folder)
    rank_cases.train(ALONE, folder)
    assert rank_cases.start("sums,train,refuse,packs", folder, ranks=2) == 0
    rank_cases.train(ALONE, folder)
    return folder


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


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(ask, tmp_path, first, second):
    whole = ask(output=tmp_path / "whole", tokens_per_step=120, checkpoint_every_steps=1)
    part = replace(whole, output=tmp_path / "part", keep_checkpoints=9)
    train(whole, lambda _: None)
    assert start(part, tmp_path, ranks=first)[0] == 0
    steps = sorted((part.output / "checkpoints").iterdir())
    assert len(steps) > 3
    for folder in steps[2:]:  # the run was killed after its second step
        folder.rename(folder.with_name(f".{folder.name}.pruned"))
    status, events = start(replace(part, resume=True), tmp_path, ranks=second)
    assert status == 0
    assert events[0]["resumed_at"] == 2
    ends = [newest_complete(r.output / "checkpoints")[0] for r in (whole, part)]
    assert [end is not None and end.position.step for end in ends] == [len(steps)] * 2
    left, right = (end.model()[0] for end in ends if end is not None)
    for name, tensor in left.items():
        assert torch.allclose(tensor, right[name], rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize(("kind", "most"), [("plain", 1e-5), ("half", 1e-5), ("rounded", 1e-2)])
def test_shared_state_is_updated_as_whole_state_is(made, kind, most):
    apart = distance(made / f"{kind}-of-1", made / f"{kind}-of-2")
    assert apart < most
    assert (apart > 1e-5) == (kind == "rounded")  # bfloat16 was really on the way
    one, two = (json.loads((made / f"{kind}-of-{n}.json").read_text()) for n in (1, 2))
    assert [norm for norm, *_ in two] == pytest.approx([norm for norm, *_ in one], rel=1e-3)
    assert [sums for _, *sums in two] == [[2.0, 1.0]] * rank_cases.STEPS  # loss 1 each, and rank


def test_uneven_packs_weigh_as_they_do_alone(made):
    assert distance(made / "packs-of-1", made / "packs-of-2") < 1e-4
    one, two = (json.loads((made / f"packs-of-{n}.json").read_text()) for n in (1, 2))
    assert len(one) == len(two) == 5
    for alone, together in zip(one, two, strict=True):
        assert together == pytest.approx(alone, rel=1e-5)
    assert [updated for *_, updated in (row[:5] for row in one)] == [True, True, False, True, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_shares_of_others_are_rounded_on_the_way(made, dtype):
    shares = [rank_cases.draw(7, rank, size=(16,)) for rank in range(2)]
    for rank in range(2):
        part = slice(8 * rank, 8 * rank + 8)
        other = shares[1 - rank][part].to(rank_cases.DTYPES[dtype]).float()
        assert torch.equal(load(made / f"sum-{dtype}-{rank}")["own"], shares[rank][part] + other)


@pytest.mark.parametrize(("wrote", "reads"), [(1, 2), (2, 1), (2, 2)])
def test_state_of_some_ranks_goes_on_with_others(made, wrote, reads):
    assert equal(made / f"plain-half-of-{wrote}", made / f"again-{wrote}-on-{reads}")
    assert distance(made / f"plain-{wrote}-on-{reads}", made / "plain-of-1") < 1e-5
    if wrote == reads:
        assert equal(made / f"plain-{wrote}-on-{reads}", made / f"plain-of-{reads}")


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_what_is_not_finite_on_one_rank_changes_nothing_on_any(made, what):
    assert equal(made / "before", made / f"after-{what}")


@pytest.mark.parametrize(
    ("case", "own", "others"),
    [
        ("fail", "TrainingError: no more", "RankError: rank 1: no more"),
        (
            "fail_early",
            "TrainingError: work: ValueError: seven",
            "RankError: rank 1: work: ValueError: seven",
        ),
    ],
)
def test_no_rank_waits_for_one_that_failed(tmp_path, case, own, others):
    assert rank_cases.start(case, tmp_path, ranks=3) != 0
    said = {path.name: rank_cases.said(path) for path in tmp_path.iterdir()}
    assert said == {
        f"{case}-0.txt": others,
        f"{case}-1.txt": own,
        f"{case}-2.txt": others,
    }


def test_alone_a_process_is_rank_0_of_1():
    with join_ranks("cpu") as ranks:
        assert (ranks.rank, ranks.world, ranks.device.type) == (0, 1, "cpu")


def test_an_error_of_a_part_says_what_was_being_done():
    def work() -> None:
        raise ValueError("seven")

    with pytest.raises(TrainingError, match="step 3: ValueError: seven") as caught:
        ALONE.together(work, doing="step 3")
    assert isinstance(caught.value.__cause__, ValueError)
