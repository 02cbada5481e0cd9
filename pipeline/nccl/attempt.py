"""One attempt with one environment: starts a process a rank, bounds it in time, ends all of it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.nccl.cases import Case
from pipeline.nccl.errors import FAILED, HANG, SUM, SUSPECT

Status = Literal["ok", "hung", "wrong", "failed"]
_CODES = {"hung": HANG, "wrong": SUM, "failed": FAILED}
_START_SECONDS = 120.0  # until torch is imported by all: a cold disk, not a hang of NCCL
_GRACE_SECONDS = 1.0  # a rank that dies takes others along: who was first is asked of all
_END_SECONDS = 20.0  # a GPU's memory is cleared before its process is gone
_LINE = 300


@dataclass(frozen=True)
class Launch:
    """What an attempt runs. environment: complete; GPUs among it. log: stderr is appended.

    silence_seconds: no word from any rank for so long, once all have torch, is a hang. inject:
    what the last rank does wrong, for tests.
    """

    backend: Literal["nccl", "gloo"]
    world: int
    cases: tuple[Case, ...]
    environment: Mapping[str, str]
    log: Path
    silence_seconds: float = 15.0
    inject: str | None = None


@dataclass(frozen=True)
class Attempt:
    """What came of it. seconds: case key -> of each batch, the slowest rank's.

    detail: one line on what went wrong, empty when ok. at: the key of the case where; None before
    the first. nccl: its version, where it got so far.
    """

    status: Status
    detail: str
    at: str | None
    seconds: Mapping[str, tuple[float, ...]]
    wall_seconds: float
    nccl: str | None = None
    pids: tuple[int, ...] = ()

    @property
    def code(self) -> str | None:
        """Of what went wrong."""
        return _CODES.get(self.status)


def attempt(launch: Launch) -> Attempt:
    """Runs the cases with all ranks. Whatever happens, no process of it is left behind.

    A rank that cannot be killed (it waits in the driver) is named in `detail`.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nccl-") as folder:
        ranks = _Ranks(launch, Path(folder) / "rendezvous")
        try:
            status, detail = ranks.follow()
        finally:
            left = ranks.end()
    if left:
        status = "hung" if status == "ok" else status
        detail += f"; PID {', '.join(map(str, left))} cannot be killed: the driver hangs"
    return Attempt(
        status=status,
        detail=detail,
        at=None if status == "ok" else ranks.at(),
        seconds=ranks.seconds(),
        wall_seconds=time.monotonic() - began,
        nccl=ranks.nccl,
        pids=ranks.pids,
    )


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    log: Path
    listener: threading.Thread | None = None
    imported: bool = False
    joined: bool = False
    finished: bool = False
    measured: dict[str, list[float]] = field(default_factory=dict)


class _Ranks:
    """The processes of one attempt and what they have said."""

    def __init__(self, launch: Launch, rendezvous: Path) -> None:
        self._launch = launch
        self._said: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._ranks: list[_Rank] = []
        self._wrong_in: str | None = None
        self.nccl: str | None = None
        try:
            for rank in range(launch.world):
                self._start(rank, rendezvous)
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.process.pid for rank in self._ranks)

    def _start(self, rank: int, rendezvous: Path) -> None:
        launch = self._launch
        log = rendezvous.parent / f"rank-{rank}.log"
        arguments = ["--inject", launch.inject] if launch.inject else []
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.nccl.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(launch.environment),
                start_new_session=True,  # a group of its own: ended with all that it started
            )
        self._ranks.append(_Rank(process, log))
        listener = threading.Thread(target=self._listen, args=(rank,), daemon=True)
        listener.start()
        self._ranks[rank].listener = listener
        request = {
            "parent": os.getpid(),
            "backend": launch.backend,
            "rank": rank,
            "world": launch.world,
            "rendezvous": str(rendezvous),
            "cases": [case.to_json() for case in launch.cases],
        }
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: its listener says so
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()

    def _listen(self, rank: int) -> None:
        stdout = self._ranks[rank].process.stdout
        assert stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed, or not JSON: it ends badly
            for line in stdout:
                self._said.put((rank, json.loads(line)))
        self._said.put((rank, None))

    def follow(self) -> tuple[Status, str]:
        """Hears all ranks to their ends; gives how it went and a line on what went wrong."""
        began = heard = time.monotonic()
        while not all(rank.finished for rank in self._ranks):
            started = all(rank.imported for rank in self._ranks)
            until = heard + self._launch.silence_seconds if started else began + _START_SECONDS
            try:
                rank, event = self._said.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return "hung", self._silence(started=started)
            heard = time.monotonic()
            kind = event["event"] if event else "ended"
            if event is not None and kind == "wrong":
                self._wrong_in = event["case"]
                return "wrong", f"rank {rank} {event['case']}: {event['what']}"
            if event is None or kind == "error":
                return "failed", self._death(rank, event)
            self._take(rank, event)
        return "ok", ""

    def _take(self, rank: int, event: Mapping[str, Any]) -> None:
        state = self._ranks[rank]
        if event["event"] == "imported":
            state.imported = True
        elif event["event"] == "joined":
            state.joined, self.nccl = True, event["nccl"]
        elif event["event"] == "case":
            state.measured[event["case"]] = event["seconds"]
        elif event["event"] == "finished":
            state.finished = True

    def _silence(self, *, started: bool) -> str:
        if not started:
            late = [str(r) for r, state in enumerate(self._ranks) if not state.imported]
            return f"rank {', '.join(late)} had not imported torch after {_START_SECONDS:.0f} s"
        where = self.at() or "the first message of all"
        seconds = self._launch.silence_seconds
        return f"no rank said anything for {seconds:g} s in {where} ({SUSPECT})"

    def _death(self, rank: int, event: Mapping[str, Any] | None) -> str:
        """Of the rank that was the first to go: killed by a signal before any that complains."""
        dead: dict[int, Mapping[str, Any] | None] = {rank: event}
        until = time.monotonic() + _GRACE_SECONDS
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                other, said = self._said.get(timeout=left)
                if said is None or said["event"] == "error":
                    dead.setdefault(other, said)
        for other, last_word in dead.items():
            code = self._ranks[other].process.poll()
            if last_word is None and code is not None and code < 0:
                signal_name = signal.Signals(-code).name
                return f"rank {other} was killed by {signal_name}; {self._last_words(other)}"
        if event is not None:
            return f"rank {rank}: {event['kind']}: {_last_line(str(event['message']))}"
        status = self._ranks[rank].process.poll()
        return f"rank {rank} ended with status {status}; {self._last_words(rank)}"

    def _last_words(self, rank: int) -> str:
        return _last_line(self._ranks[rank].log.read_text(errors="replace"))

    def at(self) -> str | None:
        """Key of the case that was wrong, or of the first that not every rank has measured.

        None before all have joined.
        """
        if self._wrong_in is not None:  # others may not have been heard yet
            return self._wrong_in
        if all(rank.joined for rank in self._ranks):
            for case in self._launch.cases:
                if not all(case.key in rank.measured for rank in self._ranks):
                    return case.key
        return None

    def seconds(self) -> dict[str, tuple[float, ...]]:
        """Of the cases that every rank measured, the slowest rank of each batch."""
        found = {}
        for case in self._launch.cases:
            if all(case.key in rank.measured for rank in self._ranks):
                batches = zip(*(rank.measured[case.key] for rank in self._ranks), strict=True)
                found[case.key] = tuple(max(batch) for batch in batches)
        return found

    def end(self) -> list[int]:
        """Closes the inputs, waits for ranks that have finished, kills the others.

        Gives the process ids of those that cannot be killed.
        """
        for rank in self._ranks:
            assert rank.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.process.stdin.close()
        if all(rank.finished for rank in self._ranks):
            _wait(self._ranks)
        for rank in self._ranks:
            if rank.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
        left = _wait(self._ranks)
        for rank in self._ranks:
            if rank.process.pid not in left:
                self._put_away(rank)
        return left

    def _put_away(self, rank: _Rank) -> None:
        assert rank.process.stdout is not None
        if rank.listener is not None:
            rank.listener.join(_END_SECONDS)
        rank.process.stdout.close()
        if text := rank.log.read_bytes():
            with self._launch.log.open("ab") as log:
                log.write(f"--- PID {rank.process.pid}\n".encode() + text[-65536:])


def _wait(ranks: Sequence[_Rank]) -> list[int]:
    """Waits for the ends of all for a while; gives the process ids of those that live on."""
    until = time.monotonic() + _END_SECONDS
    left = []
    for rank in ranks:
        try:
            rank.process.wait(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            left.append(rank.process.pid)
    return left


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["no message"])[-1][:_LINE]
