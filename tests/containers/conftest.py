import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.containers.launcher import ROOT, ContainerRun, good

TALKS = ROOT / "pipeline" / "profiles" / "tiny.jsonl"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if item.path == folder / "test_run.py":
            item.add_marker(pytest.mark.docker)


def write_profile(home: Path) -> Path:
    """A profile outside the repository, with its base and its conversations beside it."""
    folder = home / "my profiles"
    (folder / "talks").mkdir(parents=True)
    shutil.copy(TALKS, folder / "talks" / "a.jsonl")
    base = folder / "base.yaml"
    base.write_text("extends: tiny\nprepare:\n  input: talks\n")
    profile = folder / "mine.yaml"
    profile.write_text("extends: base.yaml\ntrain:\n  epochs: 2\n")
    return profile


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ContainerRun:
    """A whole run in containers, every stage. Not to be changed."""
    home = tmp_path_factory.mktemp("whole")
    found = ContainerRun(home, write_profile(home))
    good(found.run("report"))
    return found


@pytest.fixture
def run(whole: ContainerRun, tmp_path: Path) -> Iterator[ContainerRun]:
    """A copy of the whole run; what a failed test leaves of it is removed."""
    shutil.copytree(whole.root, tmp_path / "my runs")
    found = ContainerRun(tmp_path, whole.profile)
    yield found
    for name in found.containers():
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=True)


@pytest.fixture
def handed(
    whole: ContainerRun, tmp_path: Path, request: pytest.FixtureRequest
) -> tuple[ContainerRun, dict[str, Any]]:
    """A copy of the whole run, and options for its owner: where root asks, that is another user."""
    found, options = ContainerRun(tmp_path, whole.profile), {}
    if os.geteuid() == 0:
        found, options = request.getfixturevalue("stranger")
    shutil.copytree(whole.root, found.root)
    for path in (found.root, *found.root.rglob("*")):
        os.chown(path, options.get("user", -1), options.get("group", -1))
    return found, options


@pytest.fixture
def stranger() -> Iterator[tuple[ContainerRun, dict[str, Any]]]:
    """A run of another user, who may use the engine, and what starts a process as that user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    group = Path("/var/run/docker.sock").stat().st_gid
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        home = Path(folder)
        profile = write_profile(home)
        for path in (home, *home.rglob("*")):
            os.chown(path, 4242, 4243)
        environment = {"PATH": os.environ["PATH"], "HOME": folder}  # noqa: TID251
        yield (
            ContainerRun(home, profile),
            {"user": 4242, "group": 4243, "extra_groups": [group], "env": environment},
        )
