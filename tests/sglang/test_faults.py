"""Faults in mid-run, on the real server: a disk that is full, a rank that is killed."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.capture.collector import Wrong
from pipeline.capture.contract import Receipt, Refusal
from pipeline.capture.errors import ServerDied
from pipeline.store.index import Sample
from tests.processes import below
from tests.sglang.capturing import ROW_BYTES, Case, Rig, capturing, make_samples

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with capturing(Case("LlamaForCausalLM", 64), tmp_path_factory.mktemp("faults")) as running:
        yield running


def scheduler(rig: Rig) -> psutil.Process:
    [found] = below(rig.server.pid, "sglang::scheduler")
    return found


def test_what_a_full_disk_does_not_take_is_refused_and_the_server_goes_on(rig: Rig) -> None:
    samples = make_samples(12, seed=11)
    # No disk of our own to fill: a limit on the writer's files does what a full one does to them.
    most_rows = 100
    limit = most_rows * ROW_BYTES + 4096
    writer = scheduler(rig)
    writer.rlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    outcomes = {}
    for sample, answer in rig.run(samples):
        whole = isinstance(answer, Receipt) and not isinstance(rig.rows(sample, answer), Wrong)
        outcomes[len(sample.input_ids)] = whole
    assert len(outcomes) == len(samples)
    assert any(outcomes.values())
    assert not all(outcomes.values())
    assert not [length for length, whole in outcomes.items() if whole and length > most_rows + 8]
    assert not [length for length, whole in outcomes.items() if not whole and length < most_rows]
    assert list(rig.staging.folder.glob("*.safetensors")) == []

    writer.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for sample, answer in rig.run(make_samples(12, seed=12)):
        assert not isinstance(rig.rows(sample, answer), Wrong)


def test_a_rank_killed_in_mid_run_ends_it_with_its_name(rig: Rig) -> None:
    answers = rig.run(make_samples(60, seed=13))
    sample, answer = next(answers)
    assert not isinstance(rig.rows(sample, answer), Wrong)
    os.kill(scheduler(rig).pid, signal.SIGKILL)
    with pytest.raises(ServerDied, match="scheduler"):
        _take_all(rig, answers)


def _take_all(rig: Rig, answers: Iterator[tuple[Sample, Receipt | Refusal]]) -> None:
    for sample, answer in answers:
        rig.rows(sample, answer)


def test_the_log_of_a_dead_server_stays(rig: Rig) -> None:
    assert Path(rig.server.log).stat().st_size > 0
