"""A running SGLang server: started, watched, stopped in order, never forgotten.

It listens on a free loopback port with an API key of its own, lives in a process group of its own
and dies with the process that started it.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from pipeline.capture.errors import CaptureError, ServerDied
from pipeline.capture.sglang_log import is_port_taken, last_line, root_cause

_POLL_SECONDS = 0.25
_SAY_SECONDS = 10.0
_TERMINATE_SECONDS = 20.0
_PORT_TRIES = 3
_LAUNCH = "pipeline.capture.sglang_launch"


class SglangServer:
    """The server, as a context manager that gives it back ready to answer.

    flags: arguments of `sglang.launch_server`, one element each, without host, port and API key.
    python: interpreter that has SGLang and this package. environment: complete. log: its output,
    appended. say: told how the loading gets on.

    ServerDied when it ends by itself, with the traceback out of its log; CaptureError when it is
    not ready in time. Leaving the context ends the whole process group.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        python: Path,
        environment: Mapping[str, str],
        log: Path,
        startup_timeout_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._flags, self._python, self._environment = list(flags), python, dict(environment)
        self.log, self._timeout, self._say = log, startup_timeout_seconds, say
        self.key = secrets.token_hex(24)  # never begins with a dash, as other tokens may
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._members: dict[psutil.Process, str] = {}  # ranks and helpers that must stay alive

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its group's id. ValueError before the start."""
        if self._process is None:
            raise ValueError("the server was not started")
        return self._process.pid

    def client(self, *, timeout_seconds: float) -> httpx.Client:
        """An HTTP client that knows the address and the key; proxies of the machine are ignored."""
        return httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=timeout_seconds,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    def server_info(self) -> dict[str, Any]:
        """The server's own flags, resolved, and its version. CaptureError when it does not say."""
        try:
            with self.client(timeout_seconds=60.0) as client:
                answer = client.get("/server_info")
                answer.raise_for_status()
                info = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            self.check()
            raise CaptureError(
                f"{self.url}/server_info: {type(error).__name__}: {error}",
                wanted="the running server's flags",
                next_step=f"read {self.log}",
            ) from error
        if not isinstance(info, dict):
            raise CaptureError(
                f"{self.url}/server_info gave {type(info).__name__}",
                wanted="an object with the server's flags",
                next_step=f"read {self.log}",
            )
        return info

    def check(self) -> None:
        """ServerDied when the server, or one of its ranks, is gone. Costs some microseconds."""
        assert self._process is not None
        code = self._process.poll()
        gone = [
            f"{name} (pid {member.pid})"
            for member, name in self._members.items()
            if _is_gone(member)
        ]
        # SGLang kills the others when one dies: a rank, if any is gone, is the likely first.
        gone.sort(key=lambda one: "scheduler" not in one)
        if code is not None:
            with_it = f" (gone with it: {', '.join(gone)})" if gone else ""
            raise self._death(f"the SGLang server (pid {self.pid}){with_it}", code)
        if gone:
            raise self._death(f"{', '.join(gone)} of the SGLang server", None)

    def log_text(self) -> str:
        """What this server has written so far, at most the last 4 MiB."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - (4 << 20)))
            return file.read().decode(errors="replace")

    def stop(self) -> None:
        """Terminates the server, waits for it, and kills what is left of its group."""
        if self._process is None:
            return
        group = self.pid
        members = self._descendants()
        if self._process.poll() is None:
            # Its head alone: ranks that end at the same time look like a crash to it, and it stays
            # to write a diagnosis.
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_TERMINATE_SECONDS)
        # The leader may be gone while its ranks live on; the group is ours by birth.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        # A rank that left the group is known by its parentage; psutil compares the birth times.
        for member in {*members, *self._members}:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs({*members, *self._members}, timeout=5.0)
        self._process = None

    def __enter__(self) -> Self:
        for attempt in range(1, _PORT_TRIES + 1):
            try:
                self._start()
                self._wait_ready()
            except ServerDied:
                taken = is_port_taken(self.log_text())
                self.stop()
                if not taken or attempt == _PORT_TRIES:
                    raise
                self._say("server: its port was taken meanwhile; trying another")
            except BaseException:
                self.stop()
                raise
            else:
                return self
        raise AssertionError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        address = ["--host", "127.0.0.1", "--port", str(port)]
        try:
            # For the owner alone where it is made here: SGLang logs its arguments, the key too.
            self.log.touch(mode=0o600)
            with self.log.open("ab") as output:
                self._process = subprocess.Popen(
                    [str(self._python), "-m", _LAUNCH, str(os.getpid()), *self._flags, *address],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise CaptureError(
                f"{self._python}: {error.strerror}",
                wanted="an interpreter that has SGLang",
                next_step="make sglang-cpu, or set extract.server.python",
            ) from error
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(self.key.encode() + b"\n")

    def _wait_ready(self) -> None:
        began = said = time.monotonic()
        with self.client(timeout_seconds=30.0) as client:
            while not self._answers(client):
                self.check()
                now = time.monotonic()
                if now - began > self._timeout:
                    raise CaptureError(
                        f"the SGLang server was not ready after {self._timeout:.0f} s; its last "
                        f"line: {last_line(self.log_text())}",
                        wanted="a server that answers",
                        next_step=f"read {self.log}, or raise extract.server."
                        "startup_timeout_seconds",
                    )
                if now - said >= _SAY_SECONDS:
                    said = now
                    self._say(f"server: {now - began:.0f} s, {last_line(self.log_text())}")
                time.sleep(_POLL_SECONDS)
        self.check()
        names = {one: _lasting_name(one) for one in self._descendants()}
        self._members = {one: name for one, name in names.items() if name}
        self._say(
            f"server: ready after {time.monotonic() - began:.0f} s, {self.url}, "
            f"{len(self._members)} processes, log {self.log}"
        )

    def _answers(self, client: httpx.Client) -> bool:
        # /health runs one token through the model: ready means that it can answer.
        try:
            return client.get("/health").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _descendants(self) -> set[psutil.Process]:
        try:
            return set(psutil.Process(self.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return set()

    def _death(self, who: str, code: int | None) -> ServerDied:
        if code is None:
            how = "is gone"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with status {code}"
        if code == -signal.SIGKILL:
            how += " (out of memory?)"
        # A rank that dies writes its traceback last; give it a moment to reach the file.
        time.sleep(_POLL_SECONDS)
        cause = root_cause(self.log_text())
        shown = "\n  | ".join(cause) or "(it wrote nothing)"
        return ServerDied(
            f"{who} {how}; what it said:\n  | {shown}\n",
            wanted="a server that runs until the stage stops it",
            next_step=f"read {self.log}",
        )


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _lasting_name(process: psutil.Process) -> str:
    """Name of a descendant that is a rank or another lasting part of the server, else nothing."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return ""
    titles = [part for part in command if part.startswith("sglang::")]
    if titles:
        return titles[0].strip()
    return "a worker" if any("spawn_main" in part for part in command) else ""


def _is_gone(member: psutil.Process) -> bool:
    try:
        return not member.is_running() or member.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
