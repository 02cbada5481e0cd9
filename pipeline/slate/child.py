"""The stage's side of a process it starts: its own group, stopped in order, never forgotten."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pipeline.slate.errors import ChildFailed
from pipeline.slate.log import SAY
from pipeline.slate.progress import duration

_STOP_SECONDS = 20.0
_LOG_TAIL_LINES = 15
_READ_BYTES = 1 << 16
_WARNINGS = 10  # in the time that a child may be silent
_LOOK = {
    signal.SIGKILL: "the kernel's out-of-memory killer is the usual cause: look for its name in "
    "`dmesg -T` or `journalctl -k`, then free memory or lower the batch",
    signal.SIGBUS: "a full tmpfs or a bad disk under a mapped file is the usual cause: look at "
    "`df -h` and `dmesg -T`",
    signal.SIGTERM: "somebody stopped it: see who, before it starts again",
}


def ending(status: int) -> tuple[str, str]:
    """How a process ended, and where to look for why ("" where its own words must do).

    status: as subprocess gives it; a signal's number is negative.
    """
    if status >= 0:
        return f"ended with status {status}", ""
    sent = signal.Signals(-status)
    return f"was killed by {sent.name}, signal {-status}", _LOOK.get(sent, "")


class Child:
    """One Python module run as a child process, as a context manager.

    argv: arguments after `python -m module`; request: the first JSON line on its stdin, if any.
    environment: complete, as `pipeline.settings.environment` gives it. log: its stderr is appended.
    silence_seconds: a child that sends nothing for so long hangs; 0: it may be silent for ever.
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
        silence_seconds: float = 0.0,
    ) -> None:
        self.module = module
        self._log = log
        self._silence = silence_seconds
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
        breaks off without `done`, is silent for too long, or ends with a status other than 0.
        """
        for line in self._lines():
            try:
                event = json.loads(line)
            except ValueError:
                raise self._death(f"answered {line[:200]!r}, which is not JSON") from None
            if event.get("event") == "error":
                raise ChildFailed(
                    f"{self.module} (pid {self.pid}): {event.get('kind')}: {event.get('message')}",
                    wanted=event.get("wanted") or "work without an error",
                    next_step=event.get("next_step") or f"read the traceback in {self._log}",
                    code=event.get("code") or "",
                )
            if event.get("event") == "done":
                self._process.wait()
                if self._process.returncode != 0:
                    raise self._death("said it was done")
                yield event
                return
            yield event
        raise self._death("stopped answering")

    def _lines(self) -> Iterator[bytes]:
        """Lines of its stdout, until it closes it; ChildFailed when none comes in time."""
        assert self._process.stdout is not None
        file, rest = self._process.stdout.fileno(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(file, selectors.EVENT_READ)
            while True:
                self._wait(selector)
                read = os.read(file, _READ_BYTES)
                if not read:
                    break
                *lines, rest = (rest + read).split(b"\n")
                yield from lines
        if rest:
            yield rest

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Waits for output, and tells from time to time that there is none."""
        started = time.monotonic()
        while not selector.select(self._silence / _WARNINGS if self._silence else None):
            silent = time.monotonic() - started
            state = f"{self.module} (pid {self.pid}, {self._state()}) is silent for"
            if silent < self._silence:
                SAY.warning("%s %s", state, duration(silent))
                continue
            raise ChildFailed(
                f"{state} {duration(silent)}{self._log_tail()}",
                wanted=f"a word at least every {duration(self._silence)} (run.silence_seconds)",
                next_step=f"see what holds it (py-spy dump --pid, nvidia-smi, dmesg -T) the next "
                f"time, or raise run.silence_seconds; read {self._log}; RESUME=1 continues",
            )

    def _state(self) -> str:
        """How the kernel calls what the child is doing: `S (sleeping)`, `T (stopped)`."""
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            return status.split("State:")[1].splitlines()[0].strip().replace("\t", " ")
        return "gone"

    def _death(self, what: str) -> ChildFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        ended, look = ("is still running", "") if code is None else ending(code)
        return ChildFailed(
            f"{self.module} (pid {self.pid}) {what} and {ended}{self._log_tail()}",
            wanted="a child that reports done and ends with status 0",
            next_step=(f"{look}; " if look else "") + f"read {self._log}; RESUME=1 continues",
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
                os.killpg(self.pid, signal.SIGCONT)  # one that is stopped cannot end
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
