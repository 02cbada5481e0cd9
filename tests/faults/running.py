"""Commands of a run in trouble: started, traced, killed, and looked at afterwards."""

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.slate.manifest import Manifest, changed_files
from tests.stages.conftest import ROOT, Project
from tests.stages.front import WAIT_SECONDS, Command, start_front


def until(what: Callable[[], object], *, seconds: float = WAIT_SECONDS) -> None:
    """Waits until something is so; AssertionError when it does not get so."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def start(project: Project, *arguments: str) -> Command:
    """Starts a command whose output goes to files beside the run."""
    return start_front(project.arguments(*arguments)[3:], beside=project.root.parent)


def refuses(project: Project, *arguments: str) -> str:
    """Runs a command that must end with an error of three parts; gives what it said."""
    command = start(project, *arguments)
    assert command.wait() == 1, command.said
    return three_parts(command.said)


def goes_well(project: Project, *arguments: str) -> str:
    """Runs a command to its good end; gives what it said."""
    command = start(project, *arguments)
    assert command.wait() == 0, command.said
    return command.out.read_text()


def three_parts(said: str) -> str:
    assert "Traceback" not in said, said
    assert "unexpected" not in said, said
    assert "error: " in said, said
    assert "wanted:" in said, said
    assert "next:" in said, said
    return said


@dataclass(frozen=True)
class Injected:
    """An error of the system in one call: see strace(1), `inject`.

    path: below the run's folder, or absolute; only calls that name it, or a file opened by that
    name. when: the how manyeth such call of a thread. before: it fails before the old output is
    wiped.
    """

    calls: str
    error: str
    path: str
    when: int = 1
    before: bool = False


def traced(
    project: Project, injected: Injected, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command in which a call fails as told. The call must have been made."""
    strace = shutil.which("strace")
    assert strace, "these tests need strace: apt-get install strace"
    record = project.root.parent / "strace"
    done = subprocess.run(
        [
            *(strace, "-f", "--seccomp-bpf", "-qq", "-o", str(record)),
            *("-e", f"trace={injected.calls}", "-P", str(project.folder / injected.path)),
            *("-e", f"inject={injected.calls}:error={injected.error}:when={injected.when}"),
            *project.arguments(*arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert "(INJECTED)" in record.read_text(), f"{injected} was never reached: {done.stderr}"
    return done


def copy_of(whole: Project, folder: Path) -> Project:
    """A copy of a whole run, in a folder that may be written beside it."""
    shutil.copytree(whole.root, folder / "runs")
    return Project(folder / "runs")


def state_of(project: Project, stage: str) -> str:
    """`sealed <digest>`, proven byte for byte, or `unsealed`."""
    output = project.folder / stage
    if not (output / "manifest.json").exists():
        return "unsealed"
    manifest = Manifest.read(output)
    assert changed_files(output, manifest, threads=1, advance=lambda _: None) == []
    return f"sealed {manifest.digest}"
