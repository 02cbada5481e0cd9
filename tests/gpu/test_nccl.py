"""NCCL on two GPUs: real sums, a real hang, and a short sweep whose winner a stage would take."""

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline.host.gpus import read_gpus
from pipeline.nccl.attempt import Launch, attempt
from pipeline.nccl.cases import CASES
from pipeline.nccl.plan import Grid
from pipeline.nccl.profile import environment_for
from pipeline.nccl.record import ALWAYS
from pipeline.nccl.tune import Options, tune
from pipeline.settings.environment import child_environment, stage_environment

pytestmark = pytest.mark.gpu

SMALL = tuple(replace(case, size_bytes=min(case.size_bytes, 1 << 20)) for case in CASES)
SMALL = tuple({case.key: case for case in SMALL}.values())


def launch(folder: Path, *, inject: str | None = None, **variables: str) -> Launch:
    extra = {**ALWAYS, **variables}
    return Launch(
        backend="nccl",
        world=2,
        cases=SMALL,
        environment=child_environment(stage_environment(threads=1, gpus=(0, 1), extra=extra)),
        log=folder / "log",
        silence_seconds=15,
        inject=inject,
    )


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NCCL_PROTO": "LL"},
        {"NCCL_PROTO": "Simple", "NCCL_ALGO": "allreduce:Tree"},
        {"NCCL_P2P_LEVEL": "LOC"},
    ],
    ids=str,
)
def test_sums_are_exact_and_timed(tmp_path: Path, variables: dict[str, str]) -> None:
    result = attempt(launch(tmp_path, **variables))
    assert (result.status, result.detail) == ("ok", "")
    assert {*result.seconds} == {case.key for case in SMALL}
    assert all(1e-6 < s < 1.0 for found in result.seconds.values() for s in found)
    assert result.nccl is not None


def test_a_hang_on_gpus_is_ended_and_the_next_attempt_works(tmp_path: Path) -> None:
    result = attempt(launch(tmp_path, inject="hang"))
    assert (result.status, result.code) == ("hung", "HOST-NCCL-HANG")
    assert not [pid for pid in result.pids if psutil.pid_exists(pid)]
    assert attempt(launch(tmp_path)).status == "ok"
    assert read_gpus().problem is None


@pytest.mark.parametrize(
    ("inject", "status", "code"),
    [("wrong", "wrong", "HOST-NCCL-SUM"), ("crash", "failed", "HOST-NCCL-FAILED")],
)
def test_what_goes_wrong_is_named(tmp_path: Path, inject: str, status: str, code: str) -> None:
    result = attempt(launch(tmp_path, inject=inject))
    assert (result.status, result.code) == (status, code)
    assert result.detail.startswith("rank 1")


def test_a_value_that_nccl_does_not_know_fails_with_its_last_line(tmp_path: Path) -> None:
    result = attempt(launch(tmp_path, NCCL_PROTO="NoSuch"))
    assert (result.status, result.code) == ("failed", "HOST-NCCL-FAILED")
    assert len(result.detail) > len("rank 0: ")


def test_a_short_sweep_writes_what_a_stage_takes(tmp_path: Path) -> None:
    grid = Grid(("LL",), (), (), (), {}, {})
    out = tmp_path / "nccl.json"
    tune(Options(out=out, gpus=(0, 1), grid=grid, cases=SMALL), lambda _: None)
    value = json.loads(out.read_text())
    assert value["simulated"] is False
    assert {one["status"] for one in value["rows"]} == {"ok"}
    found = environment_for(out, "extraction", explicit={}, gpus=2)
    assert found == value["uses"]["extraction"]["environment"]
    assert found["NCCL_NVLS_ENABLE"] == "0"
