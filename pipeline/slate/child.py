"""The stage's side of a process it starts: its own group, stopped in order, never forgotten."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pipeline.slate.errors import ChildFailed

_STOP_SECONDS = 20.0
_LOG_TAIL_LINES = 15


class Child:
    """One Python module run as a child process, as a context manager.

    argv: arguments after `python -m module`; request: the first JSON line on its stdin, if any.
    environment: complete, as `pipeline.settings.environment` gives it. log: its stderr is appended.
    Leaving the context terminates the whole process group, waits, and kills what is left.
    """

    def __init__(
        self,
        module: str,
        *,
        environment: Mapping[str, str],
        log: Path,
        request: Mapping[str, Any] | None = None,
        argv: Sequence[str] = (),
    ) -> None:
        self.module = module
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(environment),
                start_new_session=True,  # a group of its own, so that stopping it stops its workers
            )
        self._stdin: IO[bytes] | None = self._process.stdin
        if request is not None:
            self.send(request)

    @property
    def pid(self) -> int:
        """Process id, which is also the process group's id."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one JSON line. ChildFailed when the child is gone."""
        if self._stdin is None:
            raise ValueError("the child's input is already closed")
        try:
            self._stdin.write(json.dumps(message, allow_nan=False).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._death("closed its input") from None

    def close_input(self) -> None:
        """Tells the child that no more lines come."""
        if self._stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._stdin.close()
            self._stdin = None

    def events(self) -> Iterator[dict[str, Any]]:
        """The child's events until `done`.

        ChildFailed, with what the child said or its log's last lines, when it reports an error,
        breaks off without `done`, or ends with a status other than 0.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                raise self._death(f"answered {line[:200]!r}, which is not JSON") from None
            if event.get("event") == "error":
                raise ChildFailed(
                    f"{self.module} (pid {self.pid}): {event.get('kind')}: {event.get('message')}",
                    wanted=event.get("wanted") or "work without an error",
                    next_step=event.get("next_step") or f"read the traceback in {self._log}",
                )
            if event.get("event") == "done":
                self._process.wait()
                if self._process.returncode != 0:
                    raise self._death("said it was done")
                yield event
                return
            yield event
        raise self._death("stopped answering")

    def _death(self, what: str) -> ChildFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        if code is None:
            ending = "is still running"
        elif code < 0:
            ending = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                ending += " (out of memory? see dmesg)"
        else:
            ending = f"ended with status {code}"
        return ChildFailed(
            f"{self.module} (pid {self.pid}) {what} and {ending}{self._log_tail()}",
            wanted="a child that reports done and ends with status 0",
            next_step=f"read {self._log}",
        )

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read()[-8192:].decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            if lines:
                return "; its last words:\n  | " + "\n  | ".join(lines) + "\n"
        return ""

    def stop(self) -> None:
        """Terminates the process group, waits, then kills what is left of it."""
        self.close_input()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_STOP_SECONDS)
        # The leader may be gone while members of its group live on; the group is ours by birth.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
