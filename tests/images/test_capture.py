"""The extract stage over the real server, inside the built extractor on a CPU."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pipeline.slate.manifest import Manifest
from pipeline.store.reader import StateDataset
from tests.images import checks
from tests.images.conftest import ROOT, tag_of
from tests.images.running import LOCKED_UP, docker
from tests.images.saved import read_image

pytestmark = pytest.mark.images

LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Captured:
    """states: the sealed folder. health: what the check said meanwhile, each once."""

    states: Path
    log: str
    health: list[str]


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("local")
    pairs = (f"run.root={root}", "run.name=run", f"extract.staging={root / 'staging'}")
    options = [part for pair in pairs for part in ("--set", pair)]
    subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "extract", "--profile", "tiny", *options],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return root / "run" / "extract"


@pytest.fixture(scope="module")
def in_container(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    root = tmp_path_factory.mktemp("container")
    owner = f"{os.getuid()}:{os.getgid()}"
    if os.getuid() == 0:  # then as the image's own user, who is nobody here
        owner = read_image(tag_of("trainer")).config["config"]["User"]
        user, _, group = owner.partition(":")
        os.chown(root, int(user), int(group or user))
    # The trainer writes the answers: its torch is that of the comparison, the extractor's is not.
    _run("trainer", "prepare", root=root, owner=owner)
    log, health = _run("extractor-cpu", "extract", root=root, owner=owner)
    return Captured(root / "run" / "extract", log, health)


def _run(name: str, stage: str, *, root: Path, owner: str) -> tuple[str, list[str]]:
    """Runs a stage in a container; its log and what the health check said of it."""
    container = docker(
        *("run", "--detach", *LOCKED_UP, "--shm-size", "256m", "--pids-limit", "4096"),
        *("--user", owner, "--volume", f"{root}:/runs", "--workdir", "/"),
        *("--tmpfs", "/staging:rw,nosuid,nodev,noexec,mode=1777,size=16m"),
        *("--env", "OPENBLAS_CORETYPE", "--env", "OPENBLAS_L2_SIZE"),
        *("--entrypoint", checks.PYTHON, tag_of(name), "-m", "pipeline.cli", stage),
        *("--profile", "tiny-sglang", "--set", "run.root=/runs", "--set", "run.name=run"),
        *("--set", "extract.staging=/staging/ours"),
        *("--set", f"extract.server.python={checks.PYTHON}"),
    )
    try:
        health = _watch(container)
        log = docker("logs", container)
        assert docker("wait", container) == "0", log
        return log, health
    finally:
        docker("rm", "--force", "--volumes", container)


def _watch(container: str) -> list[str]:
    """What the health check says until the container ends, each once in order."""
    said: list[str] = []
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if docker("inspect", "--format", "{{.State.Running}}", container) == "false":
            return said
        command = [
            "docker",
            "exec",
            container,
            checks.PYTHON,
            "-m",
            "pipeline.capture.sglang_health",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        line = done.stdout.strip().rpartition(": ")[2]
        if done.returncode == 0 and line not in said:
            said.append(line)
        time.sleep(0.5)
    pytest.fail(f"not done after {LIMIT_SECONDS} s: {docker('logs', container)}")


def test_the_container_s_rows_are_those_of_transformers(
    in_container: Captured, by_transformers: Path
) -> None:
    wanted, found = (StateDataset.open(one) for one in (by_transformers, in_container.states))
    assert [one.id for one in found.entries] == [one.id for one in wanted.entries]
    assert len(found.entries) == 37
    for mine, theirs in zip(found.entries, wanted.entries, strict=True):
        states, other = found.read(mine), wanted.read(theirs)
        assert torch.equal(states.input_ids, other.input_ids)
        for a, b in zip((*states.taps, states.final), (*other.taps, other.final), strict=True):
            assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.03


def test_the_server_of_the_container_is_the_locked_one(in_container: Captured) -> None:
    server = Manifest.read(in_container.states).provenance["measured"]["server"]
    [lock] = (ROOT / "docker" / "extractor").glob("requirements-cpu.txt")
    assert server["version"] == checks.pins([lock])["sglang"]


def test_the_health_check_follows_the_server(in_container: Captured) -> None:
    assert in_container.health == ["no server", "still loads", "/health gave 200"]
