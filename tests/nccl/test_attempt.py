"""SIMULATED (gloo on a CPU): real ranks that add up, hang, are wrong, break off and are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.nccl.attempt import Attempt, Launch, _Ranks, attempt
from pipeline.nccl.cases import SIMULATED_CASES
from pipeline.settings.environment import child_environment, stage_environment
from tests.nccl.make import SMALL, wait_for_ends, wait_for_ranks

EXTRACTION, TRAINING = (case.key for case in SMALL)


def launch(
    folder: Path, *, inject: str | None = None, world: int = 2, silence: float = 20
) -> Launch:
    return Launch(
        backend="gloo",
        world=world,
        cases=SMALL,
        environment=child_environment(stage_environment(threads=1, gpus=())),
        log=folder / "log",
        silence_seconds=silence,
        inject=inject,
    )


def alive(result: Attempt) -> list[int]:
    """Processes of an attempt that still run; the ids are of its own children."""
    return [pid for pid in result.pids if psutil.pid_exists(pid)]


def test_every_message_of_every_rank_is_measured(tmp_path: Path) -> None:
    given = launch(tmp_path, world=3)
    result = attempt(Launch(**{**vars(given), "cases": SIMULATED_CASES}))
    assert (result.status, result.code, result.detail, result.at) == ("ok", None, "", None)
    assert {key: len(found) for key, found in result.seconds.items()} == {
        case.key: case.samples for case in SIMULATED_CASES
    }
    assert all(seconds > 0 for found in result.seconds.values() for seconds in found)
    assert len(result.pids) == 3
    assert alive(result) == []


def test_a_hang_is_a_result_in_time_and_leaves_no_process(tmp_path: Path) -> None:
    began = time.monotonic()
    result = attempt(launch(tmp_path, inject="hang", silence=8))
    assert (result.status, result.code, result.at) == ("hung", "HOST-NCCL-HANG", EXTRACTION)
    assert "no rank said anything for 8 s in extraction: all_reduce bfloat16 1 KiB" in result.detail
    assert "HOST-KERNEL-ACS" in result.detail
    assert time.monotonic() - began < 60
    assert alive(result) == []


def test_a_sum_that_is_off_by_one_in_one_place_is_named(tmp_path: Path) -> None:
    result = attempt(launch(tmp_path, inject="wrong"))
    assert (result.status, result.code, result.at) == ("wrong", "HOST-NCCL-SUM", EXTRACTION)
    assert "element 511 of message 1 is" in result.detail
    assert result.detail.endswith("1 of 1024 are wrong")
    assert alive(result) == []


def test_a_wrong_sum_has_its_place_while_the_other_rank_is_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = _Ranks._listen

    def late(ranks: _Ranks, rank: int) -> None:
        if rank == 0:
            ranks._ranks[rank].process.wait()
        listen(ranks, rank)

    monkeypatch.setattr(_Ranks, "_listen", late)
    result = attempt(launch(tmp_path, inject="wrong"))
    assert (result.status, result.at) == ("wrong", EXTRACTION)


def test_a_crash_gives_its_last_line(tmp_path: Path) -> None:
    result = attempt(launch(tmp_path, inject="crash"))
    assert (result.status, result.code) == ("failed", "HOST-NCCL-FAILED")
    assert result.detail.startswith("rank 1: RuntimeError: injected by a test (measure.py line ")
    assert "something broke" in (tmp_path / "log").read_text()
    assert alive(result) == []


def test_the_rank_that_was_killed_is_named_not_the_one_that_lost_it(tmp_path: Path) -> None:
    result = attempt(launch(tmp_path, inject="kill"))
    assert result.status == "failed"
    assert result.detail.startswith("rank 1 was killed by SIGKILL")
    assert alive(result) == []


def test_nccl_without_a_gpu_fails_before_the_first_message(tmp_path: Path) -> None:
    given = launch(tmp_path)
    result = attempt(Launch(**{**vars(given), "backend": "nccl"}))
    assert (result.status, result.at) == ("failed", None)
    assert "has no NCCL, or sees no GPU" in result.detail


def test_a_candidate_gets_its_environment_and_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROTO", "LL128")  # of whoever starts the sweep
    given = launch(tmp_path, inject="hang", silence=30)
    extra = {**given.environment, "NCCL_ALGO": "Ring"}
    process = subprocess.Popen(
        [sys.executable, "-c", _ATTEMPT, repr({**vars(given), "environment": extra})],
        start_new_session=True,
    )
    try:
        ranks = wait_for_ranks(process.pid)
        found = [rank.environ() for rank in ranks]
        assert [one.get("NCCL_ALGO") for one in found] == ["Ring", "Ring"]
        assert not any("NCCL_PROTO" in one for one in found)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_for_ends(ranks)  # they die with the one that started them, however it died


def test_a_rank_whose_parent_is_gone_already_does_not_start() -> None:
    request = json.dumps({"parent": 1, "rank": 0, "world": 2, "backend": "gloo", "cases": []})
    command = [sys.executable, "-m", "pipeline.nccl.worker"]
    done = subprocess.run(command, input=request.encode(), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


_ATTEMPT = """
import sys
from pathlib import PosixPath
from pipeline.nccl.attempt import Launch, attempt
from pipeline.nccl.cases import Case
attempt(Launch(**eval(sys.argv[1])))
"""
