"""What the tests of faults share: a whole run, and chains of faults that run two at a time."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.stages.conftest import Project, whole

from .chains import CHAINS
from .running import copy_of

__all__ = ["whole"]


@pytest.fixture
def project(whole: tuple[Project, str], tmp_path: Path) -> Project:
    """A copy of the whole run."""
    return copy_of(whole[0], tmp_path)


@pytest.fixture(scope="session")
def chains(
    request: pytest.FixtureRequest,
    whole: tuple[Project, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mapping[tuple[str, str], Future[Any]]]:
    """(kind, stage) -> its chain, for the tests that were chosen, each on a run of its own.

    Begun when the first is asked for; as many at a time as CI has cores.
    """
    wanted = {
        (item.module.KIND, item.callspec.params["stage"])
        for item in request.session.items
        if "chains" in getattr(item, "fixturenames", ())
    }
    with ThreadPoolExecutor(2) as pool:
        yield {
            (kind, stage): pool.submit(
                chain, copy_of(whole[0], tmp_path_factory.mktemp(f"{kind}-{stage}")), stage
            )
            for (kind, stage), chain in CHAINS.items()
            if (kind, stage) in wanted
        }
