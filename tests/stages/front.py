"""The front as `make` calls it, in processes that share the imports: three seconds less a start.

What a command starts itself (workers, servers) is started as ever.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 600.0  # a loaded machine; none of it is waited for when all is well

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pipeline.cli", "pipeline.stages.plan", "pipeline.stages.verify"])


@dataclass
class Command:
    """A started command and the files that its output goes to."""

    process: Any
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def wait(self) -> int:
        """Its exit status; negative for a signal."""
        self.process.join(WAIT_SECONDS)
        assert self.process.exitcode is not None, "the command did not end"
        return int(self.process.exitcode)

    @property
    def said(self) -> str:
        return self.err.read_text()


def start_front(arguments: Sequence[str], *, beside: Path) -> Command:
    """Starts the front with arguments; its output goes to new files in the folder `beside`."""
    number = len(list(beside.glob("*.err")))
    files = [beside / f"{number}.{end}" for end in ("out", "err")]
    files[1].touch()
    process = _FORKS.Process(target=_front, args=([*arguments], *map(str, files)))
    process.start()
    return Command(process, files[0], files[1])


def run_front(arguments: Sequence[str], *, beside: Path) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, as subprocess.run with text would."""
    command = start_front(arguments, beside=beside)
    status = command.wait()
    return subprocess.CompletedProcess(
        [*arguments], status, command.out.read_text(), command.err.read_text()
    )


def _front(arguments: list[str], out: str, err: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(ROOT)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    from pipeline.cli import main

    sys.argv = ["cleanslate", *arguments]
    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
