import argparse
import dataclasses
import time
from pathlib import Path

import pytest

from benchmarks.train_step import run
from benchmarks.train_step.cases import Case
from benchmarks.train_step.table import markdown

CASES = [Case("tiny", 64, share, 2, "batch", document=32) for share in (0.5, 1.0)]


def measure(script: str, folder: Path, *, budget: float = 30.0, total: float = 60.0) -> list[dict]:
    """What becomes of two cases when a peer's interpreter is this shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    options = argparse.Namespace(
        device="cpu", warmup=1, updates=1, budget_seconds=budget, profile=False, logs=folder
    )
    place = run.Place.parse(f"specforge={python}")
    return list(run.measured(place, CASES, options, time.monotonic() + total))


def test_a_peer_that_ends_leaves_its_last_line_for_each_case(tmp_path: Path) -> None:
    found = measure("echo first >&2; echo 'OSError: no such library' >&2; exit 3", tmp_path)
    assert [one["failure"] for one in found] == ["exit status 3: OSError: no such library"] * 2
    assert [one["case"]["supervised"] for one in found] == [0.5, 1.0]


def test_a_peer_that_fails_in_one_case_is_started_anew_for_the_next(tmp_path: Path) -> None:
    say = """echo '{"failure": "OutOfMemoryError: much"}'"""
    found = measure(f"echo started >> {tmp_path}/starts; {say}", tmp_path)
    assert [one["failure"] for one in found] == ["OutOfMemoryError: much"] * 2
    assert (tmp_path / "starts").read_text() == "started\n" * 2


def test_a_peer_that_cannot_be_built_is_not_tried_again(tmp_path: Path) -> None:
    say = """echo '{"failure": "ImportError: no", "hopeless": true}'"""
    found = measure(f"echo started >> {tmp_path}/starts; {say}", tmp_path)
    assert [one["failure"] for one in found] == ["ImportError: no"] * 2
    assert (tmp_path / "starts").read_text() == "started\n"


def test_a_case_over_its_budget_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "START_SECONDS", 0.0)
    began = time.monotonic()
    found = measure("sleep 60 & wait", tmp_path, budget=0.3)
    assert [one["failure"] for one in found] == ["stopped after 0 s"] * 2
    assert time.monotonic() - began < 20


def test_nothing_is_begun_when_the_time_of_the_run_is_used_up(tmp_path: Path) -> None:
    found = measure(f"touch {tmp_path}/started", tmp_path, total=0.0)
    assert [one["failure"] for one in found] == ["not run: the whole run's time was used up"] * 2
    assert not (tmp_path / "started").exists()


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="known: ours, specforge"):
        run.Place.parse("axolotl=/somewhere")


def test_folders_are_looked_in_and_a_file_is_an_interpreter(tmp_path: Path) -> None:
    assert run.Place.parse(f"torchspec={tmp_path}:/other").paths == (str(tmp_path), "/other")
    (tmp_path / "python").touch()
    assert run.Place.parse(f"torchspec={tmp_path}/python").python == str(tmp_path / "python")


def result(trainer: str, form: str, milliseconds: float, **more: object) -> dict:
    case = dataclasses.asdict(dataclasses.replace(CASES[0], form=form))
    return {
        "trainer": trainer,
        "case": case,
        "milliseconds": milliseconds,
        "tokens_per_second": round(64 / milliseconds * 1e3),
        "peak_gib": 1.0,
        "first_step_seconds": 3.0,
        "share_of_ceiling": 0.25,
    } | more


def test_the_table_keeps_the_faster_form_and_says_what_the_other_gave() -> None:
    found = [
        result("ours", "pack", 10.0),
        result("specforge", "batch", 30.0),
        result("specforge", "row", 40.0),
    ]
    lines = markdown(found).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| tiny | 64 | 2 | 0.5 | ours | pack | 10.0 | 6,400 | 1.00 | 1.0 |")
    assert "| specforge | batch | 30.0 | 2,133 | 3.00 |" in lines[3]
    assert lines[3].endswith("| row: 1,600 tokens/s |")


def test_the_table_shows_failures() -> None:
    broken = {"trainer": "torchspec", "failure": "OutOfMemoryError: a|b", "case": {}}
    broken["case"] = dataclasses.asdict(CASES[0])
    found = [
        result("ours", "pack", 10.0),
        broken,
        broken | {"case": dataclasses.asdict(dataclasses.replace(CASES[0], form="row"))},
    ]
    lines = markdown(found).splitlines()[3:]
    assert len(lines) == 2
    assert all("failed: OutOfMemoryError: a\\|b" in line for line in lines)
