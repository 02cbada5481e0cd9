"""SIMULATED (gloo on a CPU): whole sweeps of one candidate, broken ones, and going on."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.host.gpus import Gpu, GpuFacts, read_gpus
from pipeline.nccl.attempt import Status
from pipeline.nccl.errors import HANG, NcclError
from pipeline.nccl.record import Record, identify
from pipeline.nccl.tune import Options, gpu_indexes, tune
from tests.nccl.make import ONE_PROTOCOL, SMALL, row, twice, wait_for_ends, wait_for_ranks

SHORT = replace(ONE_PROTOCOL, protocols=())


def options(folder: Path, **changes: Any) -> Options:
    given = Options(
        out=folder / "host" / "nccl.json",
        backend="gloo",
        grid=ONE_PROTOCOL,
        cases=SMALL,
        silence_seconds=20,
    )
    return replace(given, **changes)


def swept(given: Options) -> tuple[dict[str, Any], list[str]]:
    """The file that a sweep writes, and what it said."""
    said: list[str] = []
    tune(given, said.append)
    return json.loads(given.out.read_text()), said


def results(said: list[str]) -> list[str]:
    """Candidates that were launched, as they were said while the sweep ran."""
    return [
        line for line in said if line.startswith(("extraction: ", "training: ")) and " s)" in line
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str], Options]:
    """A sweep in which the only candidate gives a wrong sum."""
    given = options(tmp_path_factory.mktemp("whole"), inject={"PROTO=LL": "wrong"})
    value, said = swept(given)
    return value, said, given


Whole = tuple[dict[str, Any], list[str], Options]


def test_a_wrong_sum_disqualifies_by_name(whole: Whole) -> None:
    value, said, _ = whole
    wrong = [one for one in value["rows"] if one["status"] == "wrong"]
    assert [(one["candidate"], one["use"], one["code"]) for one in wrong] == [
        ("PROTO=LL", "extraction", "HOST-NCCL-SUM"),
        ("PROTO=LL", "training", "HOST-NCCL-SUM"),
    ]
    assert value["uses"]["extraction"]["environment"] == {"NCCL_NVLS_ENABLE": "0"}
    assert any(line.startswith("| PROTO=LL | 1 | WRONG | |") for line in map(_squeezed, said))
    assert any(line.startswith("PROTO=LL: HOST-NCCL-SUM: rank ") for line in said)


def test_the_file_says_where_it_was_measured_and_that_it_is_simulated(whole: Whole) -> None:
    value, said, _ = whole
    assert value["simulated"] is True
    assert value["measured_on"]["backend"] == "gloo"
    assert value["measured_on"].keys() >= {"host", "gpus", "driver", "torch", "nccl", "messages"}
    assert value["date"].endswith("Z")
    assert len(value["rows"]) == 6
    assert said[0].startswith("SIMULATED: gloo on the CPU of ")
    assert value["uses"]["training"]["why"] == "nothing was faster by more than the spread"


def test_both_uses_share_an_attempt(whole: Whole) -> None:
    rows = [one for one in whole[0]["rows"] if one["candidate"] == "default"]
    assert rows[0]["use"] != rows[1]["use"]
    assert rows[0]["wall_seconds"] == rows[1]["wall_seconds"]


def test_what_is_finished_is_not_run_again(whole: Whole) -> None:
    value, _, given = whole
    again, said = swept(replace(given, resume=True))
    assert again["rows"] == value["rows"]
    assert results(said) == []
    assert "going on with 6 rows" in said[0]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"cases": tuple(replace(case, samples=4) for case in SMALL)}, "another messages"),
        ({"out": Path("/nowhere/nccl.json")}, "there is neither"),
    ],
)
def test_rows_of_something_else_are_not_gone_on_with(
    whole: Whole, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    if "out" in changes:
        changes = {"out": tmp_path / "nccl.json"}
    with pytest.raises(NcclError, match=found):
        tune(replace(whole[2], resume=True, **changes), lambda _: None)


def test_a_sweep_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    given = options(tmp_path, inject={"PROTO=LL": "hang"}, silence_seconds=300)
    program = (
        "import sys\nfrom tests.nccl.test_tune import *\n"
        "tune(options(Path(sys.argv[1]), inject={'PROTO=LL': 'hang'}, silence_seconds=300), print)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], start_new_session=True
    )
    partial = given.out.with_name("nccl.json.partial")
    try:
        before = _wait_for_rows(partial, 4)  # both launches of the default
        ranks = wait_for_ranks(process.pid)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_for_ends(ranks)
    assert not given.out.exists()
    value, said = swept(replace(given, resume=True, inject={}))
    assert value["rows"][:4] == before
    assert not any(": default" in line for line in results(said))
    assert any("PROTO=LL" in line for line in results(said))
    assert not partial.exists()


def test_where_nothing_works_the_sweep_says_so_and_keeps_the_rows(tmp_path: Path) -> None:
    given = options(tmp_path, grid=SHORT, inject={"default": "hang"}, silence_seconds=2)
    with pytest.raises(NcclError, match="HOST-NCCL-HANG: extraction: the default: hung") as raised:
        tune(given, lambda _: None)
    assert "iommu=pt" in raised.value.next_step
    value = json.loads(given.out.read_text())
    assert [one["status"] for one in value["rows"]] == ["hung", "hung"]
    assert value["uses"]["extraction"]["environment"] is None


def test_when_time_is_over_the_default_wins_and_the_rest_is_named(tmp_path: Path) -> None:
    given = options(tmp_path, budget_seconds=0.01)
    value, said = swept(given)
    assert [one["candidate"] for one in value["rows"]] == ["default", "default"]
    assert value["not_run"] == ["extraction: default", "training: default"]
    assert value["uses"]["extraction"]["environment"] == {"NCCL_NVLS_ENABLE": "0"}
    assert any("make tune-nccl RESUME=1 goes on" in line for line in said)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> GpuFacts:
    """SIMULATED: the answer of a driver with two idle GPUs, which nothing is launched on."""
    facts = GpuFacts(tuple(Gpu(index, "G", 0, 1024, ()) for index in (0, 1)), "580", None)
    monkeypatch.setattr("pipeline.nccl.tune.read_gpus", lambda: facts)
    return facts


def finished(given: Options, facts: GpuFacts, *, training: Status) -> Options:
    """A sweep on two GPUs whose every row is there, to go on with; of the default alone."""
    identity = identify(facts, gpus=(0, 1), backend="nccl", cases=SMALL)
    code = None if training == "ok" else HANG
    rows = twice({}, 1.0, 1.0)
    for launch in (0, 1):
        one = row({}, launch=launch, use="training", status=training)
        rows.append(replace(one, code=code))
    record = Record(identity, {"extraction": (0, 1), "training": (0, 1)}, "2.28.9", rows)
    record.write(given.out, given.grid)
    return given


def on_gpus(folder: Path) -> Options:
    (folder / "host").mkdir()
    return options(folder, backend="nccl", grid=SHORT, resume=True)


def test_winners_are_said_as_ready_host_takes_them_after_the_file(
    tmp_path: Path, two_gpus: GpuFacts
) -> None:
    value, said = swept(finished(on_gpus(tmp_path), two_gpus, training="ok"))
    (written,) = [n for n, line in enumerate(said) if line.startswith("written: ")]
    block = yaml.safe_load("\n".join(said[written + 2 :]))
    assert block == {"nccl": {use: one["environment"] for use, one in value["uses"].items()}}
    assert block["nccl"]["extraction"] == {"NCCL_NVLS_ENABLE": "0"}
    assert results(said) == []


def test_without_a_winner_nothing_is_said_for_ready_host(
    tmp_path: Path, two_gpus: GpuFacts
) -> None:
    given = finished(on_gpus(tmp_path), two_gpus, training="hung")
    said: list[str] = []
    with pytest.raises(NcclError):
        tune(given, said.append)
    assert said[-1].startswith("written: ")


def test_what_is_simulated_is_never_said_for_ready_host(whole: Whole) -> None:
    value, said, _ = whole
    assert all(one["environment"] for one in value["uses"].values())
    assert said[-1].startswith("written: ")


def test_indexes_of_gpus_are_numbers_with_commas() -> None:
    assert gpu_indexes("") == ()
    assert gpu_indexes("0, 3") == (0, 3)
    for wrong in ("0-3", "0,,1", "all"):
        with pytest.raises(NcclError, match=wrong):
            gpu_indexes(wrong)


def test_gpus_that_are_not_there_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(NcclError) as raised:
        tune(options(tmp_path, backend="nccl", gpus=(250, 251)), lambda _: None)
    assert not (tmp_path / "host" / "nccl.json").exists()
    wanted = "make preflight" if read_gpus().problem else "make tune-nccl GPUS=0,1"
    assert wanted in raised.value.next_step


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pipeline.cli", "tune-nccl", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_the_command_writes_the_file_and_prints_the_table(tmp_path: Path) -> None:
    out = tmp_path / "nccl.json"
    done = command("--simulated", "--budget-seconds", "0.01", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "| default | 1 | ok |" in done.stdout
    assert json.loads(out.read_text())["simulated"] is True


def test_the_command_explains_what_it_cannot_read(tmp_path: Path) -> None:
    done = command("--gpus", "first", "--out", str(tmp_path / "nccl.json"))
    assert done.returncode == 1
    assert "error: GPUs are 'first'" in done.stderr


def _squeezed(line: str) -> str:
    return " ".join(line.split())


def _wait_for_rows(path: Path, count: int) -> list[dict[str, Any]]:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        if path.is_file():
            rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
            if len(rows) >= count:
                return rows
        time.sleep(0.1)
    raise AssertionError(f"no {count} rows in {path}")
