"""Ranks on two GPUs: what travels over NCCL gives what one GPU gives, and no failure hangs."""

import json
import time
from pathlib import Path

import pytest
import torch

from pipeline.training.ranks import Ranks
from tests.training import rank_cases
from tests.training.rank_cases import distance, equal, load

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by `rank_cases` on one GPU and on two, each going on from halves of both."""
    folder = tmp_path_factory.mktemp("made")
    alone = Ranks(0, 1, torch.device("cuda", 0))
    rank_cases.packs(alone, folder)
    rank_cases.train(alone, folder)
    names = "sums,train,refuse,packs"
    assert rank_cases.start(names, folder, ranks=2, device="cuda") == 0
    rank_cases.train(alone, folder)
    return folder


@pytest.mark.parametrize(("kind", "most"), [("plain", 1e-5), ("half", 1e-5), ("rounded", 1e-2)])
def test_shared_state_is_updated_as_whole_state_is(made: Path, kind: str, most: float) -> None:
    apart = distance(made / f"{kind}-of-1", made / f"{kind}-of-2")
    assert apart < most
    assert (apart > 1e-5) == (kind == "rounded")  # bfloat16 was really on the way


def test_uneven_packs_weigh_as_they_do_alone(made: Path) -> None:
    assert distance(made / "packs-of-1", made / "packs-of-2") < 1e-3
    one, two = (json.loads((made / f"packs-of-{n}.json").read_text()) for n in (1, 2))
    for alone, together in zip(one, two, strict=True):
        assert together == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_shares_of_others_are_rounded_on_the_way(made: Path, dtype: str) -> None:
    shares = [rank_cases.draw(7, rank, size=(16,)) for rank in range(2)]
    for rank in range(2):
        part = slice(8 * rank, 8 * rank + 8)
        other = shares[1 - rank][part].to(rank_cases.DTYPES[dtype]).float()
        assert torch.equal(load(made / f"sum-{dtype}-{rank}")["own"], shares[rank][part] + other)


@pytest.mark.parametrize(("wrote", "reads"), [(1, 2), (2, 1), (2, 2)])
def test_state_of_some_ranks_goes_on_with_others(made: Path, wrote: int, reads: int) -> None:
    assert equal(made / f"plain-half-of-{wrote}", made / f"again-{wrote}-on-{reads}")
    assert distance(made / f"plain-{wrote}-on-{reads}", made / "plain-of-1") < 1e-5


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_what_is_not_finite_on_one_rank_changes_nothing_on_any(made: Path, what: str) -> None:
    assert equal(made / "before", made / f"after-{what}")


@pytest.mark.parametrize(
    ("case", "own"),
    [("fail", "TrainingError: no more"), ("fail_early", "TrainingError: work: ValueError: seven")],
)
def test_no_rank_waits_for_one_that_failed(tmp_path: Path, case: str, own: str) -> None:
    began = time.monotonic()
    assert rank_cases.start(case, tmp_path, ranks=2, device="cuda") != 0
    assert time.monotonic() - began < 90
    found = own.partition(": ")[2]
    assert rank_cases.said(tmp_path / f"{case}-1.txt") == own
    assert rank_cases.said(tmp_path / f"{case}-0.txt") == f"RankError: rank 1: {found}"
