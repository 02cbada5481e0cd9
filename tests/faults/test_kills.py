"""kill -9 at ten moments of every stage, on one run, each start resuming what the last one left."""

from collections.abc import Mapping
from concurrent.futures import Future

import pytest

from tests.stages.conftest import Project

from .chains import KILLS, STAGES, Killed
from .running import state_of

pytestmark = pytest.mark.faults
KIND = "kills"


@pytest.mark.parametrize("stage", STAGES)
def test_kill_9_at_any_moment_leaves_the_old_seal_or_none_and_a_resume_equals_an_uninterrupted_run(
    whole: tuple[Project, str], chains: Mapping[tuple[str, str], Future[Killed]], stage: str
) -> None:
    straight = state_of(whole[0], stage)
    found = chains[KIND, stage].result()
    assert len(found.states) == KILLS
    assert found.met, "no start was killed while it ran"
    assert "unsealed" in found.states, "no start was killed between the wipe and the seal"
    sealed = {*found.states, found.last} - {"unsealed"}
    if stage == "report":  # it shows when it was made; that it is whole was looked at
        assert sealed
    else:
        assert sealed == {straight}
