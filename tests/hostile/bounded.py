"""The tests' side of `server.py`: asks it, and says when it died or took too long."""

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


class Bounded:
    """Readers in a process of their own with bounded memory and time; started anew when it dies."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def read(self, reader: str, path: Path, *, seconds: float = 20.0) -> dict[str, Any]:
        """What became of reading a file: `kind` is read, skip, fault, crash, died or endless."""
        return self._ask({"reader": reader, "path": str(path)}, seconds)

    def command(self, *arguments: str, seconds: float = 60.0) -> dict[str, Any]:
        """What became of a command of the command line: its status and what it said."""
        return self._ask({"cli": arguments}, seconds)

    def _ask(self, asked: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._process is None:
            with self._log.open("a") as log:
                self._process = subprocess.Popen(
                    # Else each thread reserves 64 MiB of what may be asked for, on many cores.
                    ["env", "MALLOC_ARENA_MAX=2", sys.executable, "-m", "tests.hostile.server"],
                    cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                )  # fmt: skip
            self._ask({"reader": "json", "path": "/nowhere"}, 120.0)  # it has started
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self.stop()
            return {"kind": "endless"}
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.stop()
            return {"kind": "died", "status": code, "log": self._log.read_text()[-1500:]}
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
