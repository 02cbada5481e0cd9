"""How facts are read: files, folders and commands of a host, each within a time limit.

A parser gets text and knows nothing of where it comes from, so recorded shapes can be given to it,
and another reader (over ssh, say) can stand in for this one.
"""

import os
import signal
import stat
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.settings.environment import child_environment

_SECONDS = 10.0


@dataclass(frozen=True)
class Missing:
    """A fact that could not be read, and why. hung: there was no answer within the time limit."""

    reason: str
    hung: bool = False


@dataclass(frozen=True)
class Output:
    """What a command said."""

    status: int
    text: str
    error: str = ""

    @property
    def last_error(self) -> str:
        """The last line of its errors, or its status where it said nothing."""
        lines = self.error.strip().splitlines()
        return lines[-1].strip() if lines else f"ended with {self.status}"


@dataclass(frozen=True)
class Entry:
    """Whose a file or folder is."""

    uid: int
    gid: int
    mode: int
    folder: bool


@dataclass(frozen=True)
class Room:
    """Size of a file system, live."""

    bytes: int
    free_bytes: int


class Reader(Protocol):
    """Reads a host. Nothing of it raises for what is not there: that is a Missing."""

    def text(self, path: str) -> str | Missing:
        """The text of a file."""

    def names(self, folder: str) -> tuple[str, ...] | Missing:
        """What a folder holds, sorted."""

    def entry(self, path: str) -> Entry | Missing:
        """Owner and mode, links followed."""

    def room(self, path: str) -> Room | Missing:
        """Size of the file system that `path` lies on."""

    def command(self, *arguments: str, seconds: float = _SECONDS) -> Output | Missing:
        """Runs a command. Missing when there is no such command, or no answer in time."""


@dataclass(frozen=True)
class HostReader:
    """This host, or a folder that looks like the root of one."""

    root: Path = Path("/")

    def text(self, path: str) -> str | Missing:
        """The text of a file; bytes that are no UTF-8 are replaced."""
        try:
            return self._at(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return Missing(f"{path}: {error.strerror}")

    def names(self, folder: str) -> tuple[str, ...] | Missing:
        """What a folder holds, sorted."""
        try:
            return tuple(sorted(path.name for path in self._at(folder).iterdir()))
        except OSError as error:
            return Missing(f"{folder}: {error.strerror}")

    def entry(self, path: str) -> Entry | Missing:
        """Owner and mode, links followed."""
        try:
            found = self._at(path).stat()
        except OSError as error:
            return Missing(f"{path}: {error.strerror}")
        mode = stat.S_IMODE(found.st_mode)
        return Entry(found.st_uid, found.st_gid, mode, stat.S_ISDIR(found.st_mode))

    def room(self, path: str) -> Room | Missing:
        """Size of the file system that `path` lies on: the live one, whatever fstab says."""
        try:
            found = os.statvfs(self._at(path))
        except OSError as error:
            return Missing(f"{path}: {error.strerror}")
        return Room(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def command(self, *arguments: str, seconds: float = _SECONDS) -> Output | Missing:
        """Runs a command in a session of its own; what hangs is killed, and not waited for."""
        environment = child_environment({"LC_ALL": "C"})
        environment["PATH"] = f"{environment.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return Missing(f"{arguments[0]}: {error.strerror}")
        try:
            text, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            kill(process)
            return Missing(f"{arguments[0]} did not answer in {seconds:g} s", hung=True)
        return Output(process.returncode, text, said)

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def kill(process: subprocess.Popen[str]) -> None:
    """Ends a command that hangs, with its children; one in state D stays and is left."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2.0)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
