"""`adopt` through the command line, with dumps of the tiny profile's real states."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from pipeline.faults import Fault
from pipeline.settings.load import load_settings
from pipeline.slate.manifest import Manifest
from pipeline.stages.adopt import AdoptStage
from pipeline.stages.overrides import engine_overrides
from pipeline.stages.run import Run
from pipeline.store.reader import StateDataset
from tests.adoption.conftest import Captured, write_request, write_samples
from tests.stages.conftest import ROOT, Project, good, refused


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


class Mixed:
    """A dump with right requests and one or two of every kind of wrong ones, adopted."""

    def __init__(self, captured: Captured, root: Path) -> None:
        self.dump, self.samples, self.ran = root / "dump", root / "old.jsonl", root / "ran"
        write_samples(self.samples, captured)
        for number, states in enumerate(captured.states[:31]):
            write_request(self.dump, number, states)
        states = captured.states
        self._spoil(states)
        self.before = tree(root)
        self.project = Project(root / "runs")
        options = ("--dump", str(self.dump), "--samples", str(self.samples))
        self.options = (*options, "--set", "extract.least_kept_share=0.6")
        self.said = good(self.project.run("adopt", *self.options))
        self.after = tree(root)
        listed = (self.project.folder / "extract" / "requests.jsonl").read_text().splitlines()
        self.requests = {line["request"]: line for line in map(json.loads, listed)}

    def _spoil(self, states: list[list[torch.Tensor]]) -> None:
        d = self.dump
        (d / "req_1" / "aux_2.pt").unlink()
        os.truncate(d / "req_2" / "final.pt", 2000)
        rot = bytearray((d / "req_3" / "aux_0.pt").read_bytes())
        rot[len(rot) // 2] ^= 4
        (d / "req_3" / "aux_0.pt").write_bytes(rot)
        (d / "req_4" / "aux_0.pt").rename(d / "req_4" / "x")
        (d / "req_4" / "aux_1.pt").rename(d / "req_4" / "aux_0.pt")
        (d / "req_4" / "x").rename(d / "req_4" / "aux_1.pt")
        torch.save([states[6][0], Bomb(self.ran)], d / "req_6" / "aux_1.pt")  # noqa: TID251
        shutil.copytree(d / "req_7", d / "req_40")
        write_request(d, 41, [one.float() for one in states[8]])
        write_request(d, 42, [one[:-5] for one in states[33]])
        write_request(d, 43, [one.flip(0) for one in states[34]])
        write_request(d, 44, [one[:, :32] for one in states[35]])
        write_request(d, 45, [torch.cat([one, one[:60]]) for one in states[36]])


def tree(root: Path) -> dict[str, tuple[int, int, str]]:
    """Size, time and digest of every file of a dump and the samples, and times of folders."""
    found = {}
    for path in sorted([root / "old.jsonl", *(root / "dump").rglob("*")]):
        facts = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (facts.st_size, facts.st_mtime_ns, digest)
    return found


@pytest.fixture(scope="session")
def mixed(captured: Captured, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    return Mixed(captured, tmp_path_factory.mktemp("mixed"))


def test_every_request_is_accounted_for(mixed: Mixed) -> None:
    assert mixed.project.manifest("extract").counts["dump"] == {
        "found": 37,
        "adopted": 26,
        "refused": {
            "incomplete": 1,
            "unreadable": 1,
            "damaged": 1,
            "swapped": 1,
            "unsafe_pickle": 1,
            "duplicate": 1,
            "duplicate_other_bytes": 1,
            "short": 1,
            "no_match": 1,
            "wrong_width": 1,
            "no_length": 1,
        },
    }
    wrong = {name: one["outcome"] for name, one in mixed.requests.items()}
    assert Counter(wrong.values())["adopted"] == 26
    assert wrong["req_1"] == "incomplete"
    assert wrong["req_2"] == "unreadable"
    assert wrong["req_3"] == "damaged"
    assert wrong["req_4"] == "swapped"
    assert wrong["req_6"] == "unsafe_pickle"
    assert wrong["req_40"] == "duplicate"
    assert wrong["req_41"] == "duplicate_other_bytes"
    assert wrong["req_42"] == "short"
    assert wrong["req_45"] == "no_length"


def test_every_sample_is_accounted_for(mixed: Mixed) -> None:
    counts = mixed.project.manifest("extract").counts
    assert (counts["read"], counts["kept"]) == (37, 26)
    assert counts["skipped"] == {"no_dump": 10, "damaged": 1}
    assert "37 requests found, 26 adopted, 11 left out" in mixed.said


def test_the_states_are_those_that_were_captured(mixed: Mixed, captured: Captured) -> None:
    dataset = StateDataset.open(mixed.project.folder / "extract")
    assert len(dataset.entries) == 26
    for entry in dataset.entries:
        found, number = dataset.read(entry), int(entry.id[2:])
        assert found.input_ids.tolist() == captured.ids[number]
        assert found.supervised.int().tolist() == captured.masks[number]
        for one, other in zip((*found.taps, found.final), captured.states[number], strict=True):
            assert torch.equal(one, other)


def test_the_dump_is_only_read_and_nothing_in_it_is_run(mixed: Mixed) -> None:
    assert mixed.after == mixed.before
    assert not mixed.ran.exists()


def test_the_seal_says_where_the_states_come_from(mixed: Mixed) -> None:
    manifest = mixed.project.manifest("extract")
    assert manifest.stage == "extract"
    assert manifest.settings["engine"] == "adopted"
    assert manifest.settings["dump"]["path"] == str(mixed.dump)
    assert manifest.settings["dump"]["requests"] == 37


def test_later_stages_follow_without_dump_or_samples(mixed: Mixed, tmp_path: Path) -> None:
    shutil.copytree(mixed.project.root, tmp_path / "runs")
    away = [(path, path.with_name(f"{path.name}.away")) for path in (mixed.dump, mixed.samples)]
    for path, other in away:
        path.rename(other)
    try:
        said = good(Project(tmp_path / "runs").run("train", "--set", "train.epochs=1"))
    finally:
        for path, other in away:
            other.rename(path)
    assert f"prepare was made from token ids, {mixed.samples}: following that" in said
    assert f"extract was adopted from {mixed.dump}: following that" in said
    assert "train: sealed" in said


def test_killed_in_the_middle_it_resumes_to_the_same_seal(mixed: Mixed, tmp_path: Path) -> None:
    project = Project(tmp_path / "runs")
    process = project.start("adopt", *mixed.options, "--set", "run.threads=1")
    journal = project.folder / "extract" / "journal.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)  # the journal is the sign, not the time
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not project.sealed("extract")
    # By the stage's own name, and without the dump's: what was begun is gone on with.
    said = good(project.run("train", "--set", "extract.least_kept_share=0.6",
                            "--set", "train.epochs=1"))  # fmt: skip
    assert "extract was begun and not finished: continuing it" in said
    assert project.manifest("extract").digest == mixed.project.manifest("extract").digest


def test_with_the_runs_own_samples_the_shards_are_equal_byte_for_byte(
    captured: Captured, tmp_path: Path
) -> None:
    shutil.copytree(captured.project.root, tmp_path / "runs")
    project = Project(tmp_path / "runs")
    before = project.manifest("extract").files
    for number, states in enumerate(captured.states):
        write_request(tmp_path / "dump", number + 100, states)
    good(project.run("adopt", "--dump", str(tmp_path / "dump")))
    after = project.manifest("extract").files
    shards = [name for name in before if name.startswith("states-")]
    assert len(shards) == 4  # two shards and their indexes
    assert [after[name] for name in shards] == [before[name] for name in shards]


def test_a_stale_dump_is_refused_and_the_old_states_stay(
    captured: Captured, tmp_path: Path
) -> None:
    shutil.copytree(captured.project.root, tmp_path / "runs")
    project = Project(tmp_path / "runs")
    before = project.manifest("extract").digest
    for number, states in enumerate(captured.states[:9]):
        write_request(tmp_path / "dump", number, [one.flip(0) for one in states])
    said = refused(project.run("adopt", "--dump", str(tmp_path / "dump")))
    assert "none of 9 requests" in said
    assert "no_match" in said
    assert project.manifest("extract").digest == before


def test_too_few_states_are_not_sealed(captured: Captured, tmp_path: Path) -> None:
    shutil.copytree(captured.project.root, tmp_path / "runs")
    project = Project(tmp_path / "runs")
    for number in (5, 6, 7):
        write_request(tmp_path / "dump", number, captured.states[number])
    said = refused(project.run("adopt", "--dump", str(tmp_path / "dump")))
    assert "states for 3 of 37 samples" in said
    assert "extract.least_kept_share, 99%" in said
    assert not project.sealed("extract")


@pytest.mark.parametrize(("dump", "runs"), [("dump", "dump/runs"), ("runs/tiny/dump", "runs")])
def test_a_dump_and_a_run_may_not_lie_in_one_another(tmp_path: Path, dump: str, runs: str) -> None:
    (tmp_path / dump / "req_0").mkdir(parents=True)
    (tmp_path / runs).mkdir(exist_ok=True)
    overrides = [f"run.root={tmp_path / runs}", f"adopt.dump={tmp_path / dump}"]
    stage = AdoptStage(Run(load_settings("tiny", overrides=overrides).settings))
    with pytest.raises(Fault, match="lie in one another"):
        stage.check()


def test_a_stage_with_an_engine_of_its_own_keeps_adopted_states(tmp_path: Path) -> None:
    (tmp_path / "extract").mkdir()
    Manifest("extract", {"engine": "adopted"}, {}, {}, {}, {}, {}).write(tmp_path / "extract")
    found = engine_overrides("evaluate", "sglang", folder=tmp_path)
    assert found == ["evaluate.engine=sglang"]


def test_make_hands_dump_and_samples_to_the_command_line() -> None:
    again = ["RESUME=1"]
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/ready", "adopt", "SAMPLES=s.jsonl", "DUMP=/old dump", *again],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cli adopt --profile" in done.stdout
    assert '--samples "s.jsonl" --dump "/old dump" --resume' in done.stdout
