"""Drives `docker/run.sh` and looks at the engine from outside, for the tests marked `docker`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.slate.manifest import Manifest
from tests.processes import hear_ctrl_c

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 90.0


def inspected(name: str) -> dict[str, Any]:
    """What the engine says of a container."""
    return dict(json.loads(docker("inspect", name))[0])


class ContainerRun:
    """One run in containers: its profile, in a folder of its own whose name has a blank."""

    def __init__(self, home: Path, profile: Path) -> None:
        self.profile, self.root = profile, home / "my runs"
        self.folder = self.root / profile.stem
        self._logs_before: set[Path] = set()

    def arguments(self, stage: str, *more: str) -> list[str]:
        return [
            *("bash", str(ROOT / "docker" / "run.sh"), stage, "--profile", str(self.profile)),
            *("--set", f"run.root={self.root}", *more),
        ]

    def run(self, stage: str, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.arguments(stage, *more),
            cwd=self.profile.parent,
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    def start(self, stage: str, *more: str) -> subprocess.Popen[str]:
        """Starts it in a process group of its own, as a shell does."""
        self._logs_before = self._logs(stage)
        return subprocess.Popen(
            self.arguments(stage, *more),
            cwd=self.profile.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            preexec_fn=hear_ctrl_c,
        )

    def _logs(self, stage: str) -> set[Path]:
        return {*self.folder.glob(f"logs/*-{stage}-*.log")}

    def containers(self, stage: str | None = None) -> list[str]:
        labels = [f"cleanslate.run={self.folder}"]
        labels += [f"cleanslate.stage={stage}"] if stage else []
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        return docker("ps", "--all", *filters, "--format", "{{.Names}}").split()

    def running(self, stage: str) -> dict[str, Any]:
        """Waits until the started stage has opened its log; gives what the engine says of it."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if [path for path in self._logs(stage) if path not in self._logs_before]:
                return inspected(*self.containers())
            time.sleep(0.1)
        raise AssertionError(f"no container of {stage} within {START_SECONDS:.0f} s")

    def created(self, stage: str, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Waits for the container of a stage; gives what the engine says of it."""
        while process.poll() is None:
            if names := self.containers(stage):
                return inspected(*names)
            time.sleep(0.1)
        raise AssertionError(f"no container of {stage}: {process.communicate()}")

    def digest(self, stage: str) -> str:
        return Manifest.read(self.folder / stage).digest


def local(profile: Path, root: Path, stage: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The same stage by the command line of this environment."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pipeline.cli", stage, "--profile", str(profile)),
            *("--set", f"run.root={root}", *more),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    """What a terminal does: the signal goes to every process of the group."""
    os.killpg(process.pid, signal.SIGINT)


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(done: subprocess.CompletedProcess[str], *, status: int = 1) -> str:
    assert done.returncode == status, done.stdout + done.stderr
    assert "wanted:" in done.stderr
    assert "next:" in done.stderr
    return done.stderr
