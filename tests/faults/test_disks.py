"""Errors of a disk in one call of a real stage, one after the other on one run."""

import re
from collections.abc import Mapping
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import pytest

from tests.stages.conftest import Project

from .chains import FAULTS, Chain
from .running import state_of, three_parts

pytestmark = pytest.mark.faults
KIND = "faults"
WORDS = {
    "ENOSPC": "No space left on device",
    "EIO": "Input/output error",
    "EROFS": "Read-only file system",
}
WHOLE = re.compile(r"states-\d+\.json|step-\d+")
CASES = [
    pytest.param(stage, number, id="-".join((one.error, one.calls, *Path(one.path).parts[-2:])))
    for stage, ones in FAULTS.items()
    for number, one in enumerate(ones)
]


@pytest.mark.parametrize(("stage", "number"), CASES)
def test_a_disk_that_fails_is_named_and_nothing_is_sealed(
    whole: tuple[Project, str],
    chains: Mapping[tuple[str, str], Future[Chain]],
    stage: str,
    number: int,
) -> None:
    found = chains[KIND, stage].result().starts[number]
    assert found.status == 1, found.said
    three_parts(found.said)
    assert WORDS[found.injected.error] in found.said
    # The file as a person knows it: without the name that it has while it is built.
    assert Path(found.injected.path).name.removesuffix(".partial").strip(".") in found.said
    straight = state_of(whole[0], stage)
    assert found.state == (straight if found.injected.before else "unsealed")


@pytest.mark.parametrize("stage", ["extract", "train"])
def test_what_is_whole_stays_through_every_fault_that_follows(
    chains: Mapping[tuple[str, str], Future[Chain]], stage: str
) -> None:
    wiped = [one for one in chains[KIND, stage].result().starts if not one.injected.before]
    left = [{path.name for path in one.places if WHOLE.fullmatch(path.name)} for one in wiped]
    assert all(before <= after for before, after in pairwise(left))
    assert len(left[-1]) > len(left[0])


@pytest.mark.parametrize("stage", FAULTS)
def test_after_all_faults_a_resume_gives_the_digest_of_an_uninterrupted_run(
    whole: tuple[Project, str], chains: Mapping[tuple[str, str], Future[Chain]], stage: str
) -> None:
    last = chains[KIND, stage].result().last
    if stage == "report":
        assert last.startswith("sealed ")
    else:
        assert last == state_of(whole[0], stage)
