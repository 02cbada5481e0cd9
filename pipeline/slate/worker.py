"""The child's side of a process that a stage starts.

A child gets one JSON line on stdin (the request), may get more, and answers in JSON lines on its
original stdout. Prints of libraries go to stderr, which is the stage's log, so they cannot corrupt
the answers. The kernel kills the child when its parent dies, however the parent dies.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from pipeline.faults import Fault, described
from pipeline.slate.files import disk_fault

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Channel:
    """JSON lines to and from the parent."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests = requests
        self._answers = answers

    def emit(self, event: Mapping[str, Any]) -> None:
        """Sends one event; a parent that is gone ends this process."""
        self._answers.write(json.dumps(event, allow_nan=False) + "\n")
        self._answers.flush()

    def receive(self) -> Iterator[dict[str, Any]]:
        """Further lines from the parent, until it closes its end."""
        for line in self._requests:
            yield json.loads(line)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux)."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the request was in force
        sys.exit(1)


def open_channel() -> Channel:
    """Takes stdin and stdout for the channel and sends later prints to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return Channel(sys.stdin, answers)


def report_error(channel: Channel, error: BaseException, *, who: str = "") -> None:
    """Sends the error as an event (with its three parts when it is a Fault) and logs it whole.

    who: stands before its words, where several processes answer in one channel.
    """
    with contextlib.suppress(OSError):  # the log may be what is full
        traceback.print_exc()
    if isinstance(error, OSError):
        again = "the same command with RESUME=1"
        error = disk_fault(error, place=Path.cwd(), next_step=again) or error
    # Of one that nobody foresaw the words alone say little: with where it was raised.
    words = described(error).partition(": ")[2]
    channel.emit(
        {
            "event": "error",
            "kind": type(error).__name__,
            "message": who + (getattr(error, "found", None) or words),
            "wanted": getattr(error, "wanted", None),
            "next_step": getattr(error, "next_step", None),
            "code": error.code if isinstance(error, Fault) else None,
        }
    )


def run_worker(main: Callable[[dict[str, Any], Channel], None]) -> None:
    """Runs a child's `main(request, channel)` and ends the process with its outcome.

    The last event is `done` on success and `error` on failure; exit status 0 or 1.
    """
    die_with_parent()
    # A Ctrl-C goes to the whole terminal group; the parent stops its children in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = open_channel()
    try:
        request = json.loads(sys.stdin.readline())
        main(request, channel)
        channel.emit({"event": "done"})
    except Exception as error:
        report_error(channel, error)
        sys.exit(1)
