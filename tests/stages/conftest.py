import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.slate.manifest import Manifest
from tests.stages.front import ROOT, run_front


class Project:
    """The tiny profile in a folder of its own, driven by its public commands."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "tiny"

    def arguments(self, *arguments: str) -> list[str]:
        command, *rest = arguments
        return [
            *(sys.executable, "-m", "pipeline.cli", command, "--profile", "tiny"),
            *("--set", f"run.root={self.root}"),
            *("--set", f"extract.staging={self.root / 'staging'}", *rest),
        ]

    def run(
        self, *arguments: str, preexec: Callable[[], None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        if preexec is None:
            return run_front(self.arguments(*arguments)[3:], beside=self.root.parent)
        return subprocess.run(
            self.arguments(*arguments),
            cwd=ROOT,
            capture_output=True,
            text=True,
            preexec_fn=preexec,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.arguments(*arguments),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def manifest(self, stage: str) -> Manifest:
        return Manifest.read(self.folder / stage)

    def sealed(self, stage: str) -> bool:
        return (self.folder / stage / "manifest.json").exists()


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "wanted:" in done.stderr
    assert "next:" in done.stderr
    return done.stderr


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """A whole run of all stages, and what it printed. Not to be changed."""
    project = Project(tmp_path_factory.mktemp("whole"))
    return project, good(project.run("report"))


@pytest.fixture
def project(whole: tuple[Project, str], tmp_path: Path) -> Project:
    """A copy of the whole run."""
    shutil.copytree(whole[0].root, tmp_path / "runs")
    return Project(tmp_path / "runs")
