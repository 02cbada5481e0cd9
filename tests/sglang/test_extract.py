"""The extract stage over the real server on a CPU, by its public commands."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from pipeline.slate.files import read_json
from pipeline.slate.manifest import Manifest
from pipeline.store.index import ShardIndex
from pipeline.store.layout import ShardLayout, state_fields
from pipeline.store.reader import StateDataset
from tests.processes import below

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]


def arguments(root: Path, command: str, *, profile: str, sets: tuple[str, ...] = ()) -> list[str]:
    pairs = (f"run.root={root}", "run.name=run", f"extract.staging={root / 'staging'}", *sets)
    options = [part for pair in pairs for part in ("--set", pair)]
    return [sys.executable, "-m", "pipeline.cli", command, "--profile", profile, *options]


def stage(
    root: Path, command: str, *rest: str, profile: str = "tiny-sglang", sets: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*arguments(root, command, profile=profile, sets=sets), *rest],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Folders of the same samples captured by transformers and by the server; what it said."""
    folders, said = [], ""
    for profile in ("tiny", "tiny-sglang"):
        root = tmp_path_factory.mktemp(profile)
        done = stage(root, "extract", profile=profile)
        assert done.returncode == 0, done.stdout + done.stderr
        folders.append(root / "run" / "extract")
        said = done.stdout
    return folders[0], folders[1], said


def test_the_server_s_rows_are_those_of_transformers(both: tuple[Path, Path, str]) -> None:
    wanted, found = (StateDataset.open(folder) for folder in both[:2])
    assert [one.id for one in found.entries] == [one.id for one in wanted.entries]
    for mine, theirs in zip(found.entries, wanted.entries, strict=True):
        states, other = found.read(mine), wanted.read(theirs)
        assert torch.equal(states.input_ids, other.input_ids)
        for a, b in zip((*states.taps, states.final), (*other.taps, other.final), strict=True):
            assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.03


def test_the_log_probabilities_agree_with_the_server_s(both: tuple[Path, Path, str]) -> None:
    manifest = Manifest.read(both[1])
    measured = manifest.provenance["measured"]
    assert 0 < measured["logprob_greatest_difference_nats"] < 0.25
    assert manifest.counts["kept"] == manifest.counts["read"] == 37


def test_the_manifest_tells_what_served_and_the_probes(both: tuple[Path, Path, str]) -> None:
    server = read_json(both[1] / "server.json")
    assert server["version"] == "0.5.23"
    assert server["disable_radix_cache"] is True
    assert len(server["probes"]) == 4
    assert "longer than a chunk: 97 rows in 2 spans" in server["probes"][-1]
    assert "key" not in str(server).lower().replace("keys", "")
    assert Manifest.read(both[1]).provenance["measured"]["server"] == server


def test_no_process_and_no_staging_is_left(both: tuple[Path, Path, str]) -> None:
    assert "server: ready" in both[2]
    root = str(both[1].parents[1])
    for process in psutil.process_iter(["cmdline"]):
        assert root not in " ".join(process.info["cmdline"] or [])
    assert not (both[1].parents[1] / "staging").exists() or not list(
        (both[1].parents[1] / "staging").iterdir()
    )


def start_until_ready(root: Path) -> subprocess.Popen[str]:
    running = subprocess.Popen(
        arguments(root, "extract", profile="tiny-sglang"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if "server: ready" in line:
            return running
    raise AssertionError("the server was never ready")


def test_a_rank_that_dies_ends_the_stage_and_a_resume_goes_on(tmp_path: Path) -> None:
    running = start_until_ready(tmp_path)
    [rank] = below(running.pid, "sglang::scheduler")
    os.kill(rank.pid, signal.SIGKILL)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 1, said
    assert "sglang::scheduler" in said
    assert "gone" in said  # by itself, or with the server that SGLang kills at once after it
    assert not (tmp_path / "run" / "extract" / "manifest.json").exists()
    done = stage(tmp_path, "extract", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert Manifest.read(tmp_path / "run" / "extract").counts["kept"] == 37


def test_a_stage_that_is_killed_takes_its_server_along(tmp_path: Path) -> None:
    running = start_until_ready(tmp_path)
    children = below(running.pid)
    assert len(children) >= 3
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=15)
    assert alive == []


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("extract.server.python=/usr/bin/python3",), "has SGLang (none)"),
        (("extract.server.python=/none",), "No such file"),
        (('extract.server.extra_arguments=["--disable-radix-cache"]',), "repeats"),
    ],
)
def test_what_cannot_work_is_refused_before_the_wipe(
    both: tuple[Path, Path, str], sets: tuple[str, ...], says: str
) -> None:
    root = both[1].parents[1]
    done = stage(root, "extract", sets=sets)
    assert done.returncode == 1
    assert says in done.stderr
    assert Manifest.read(both[1])


def test_a_repair_starts_one_server_for_exactly_the_lost_samples(
    both: tuple[Path, Path, str], tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    shutil.copytree(both[1].parents[1], root)
    output = root / "run" / "extract"
    index = ShardIndex.read(output / "states-00000.json")
    bad = index.entries[3]
    starts = ShardLayout(state_fields(64, taps=3), index.rows).offsets()
    with (output / index.shard).open("r+b") as file:
        file.seek(starts["tap_1"] + bad.offset * 128)
        file.write(b"\x00\x00\x00")
    (output / "states-00001.safetensors").unlink()
    gone = ShardIndex.read(output / "states-00001.json").entries
    done = stage(root, "repair")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"repair: {1 + len(gone)} samples in 2 shards are captured again: {bad.id}" in done.stdout
    )
    [record] = Manifest.read(output).provenance["repairs"]
    assert record["samples"] == {
        "states-00000": [bad.id],
        "states-00001": sorted(one.id for one in gone),
    }
    assert record["server"]["version"]
    assert "extract: whole" in stage(root, "verify").stdout
    wanted, found = StateDataset.open(both[0]), StateDataset.open(output)
    for mine, theirs in zip(found.entries, wanted.entries, strict=True):
        a, b = found.read(mine).final.float(), wanted.read(theirs).final.float()
        assert float((a - b).norm() / b.norm()) < 0.03
