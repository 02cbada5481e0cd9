"""Progress of long work: a bar on a terminal, one line a while in a log."""

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

_LINE_SECONDS = 10.0


class Progress:
    """Done, total, rate and time left of one piece of work, as a context manager.

    On a terminal one line is rewritten a few times a second; elsewhere one line is printed every
    ten seconds and one at the end. Work taken over from an earlier run is passed as `already`, so
    that the rate counts only what this run does.
    """

    def __init__(
        self, label: str, *, total: int, unit: str, already: int = 0, stream: TextIO | None = None
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = self._already = already
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._start = self._shown = time.monotonic()
        self._note = ""

    def __enter__(self) -> Self:
        self._start = self._shown = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._show(end="\n" if self._terminal else "")

    def advance(self, count: int = 1, note: str = "") -> None:
        """Counts `count` more units as done; `note` is shown at the end of the line."""
        self._done += count
        self._note = note or self._note
        now = time.monotonic()
        if now - self._shown >= (0.2 if self._terminal else _LINE_SECONDS):
            self._shown = now
            self._show(end="")

    def _show(self, *, end: str) -> None:
        line = progress_line(
            self._label,
            done=self._done,
            total=self._total,
            unit=self._unit,
            new=self._done - self._already,
            seconds=time.monotonic() - self._start,
        )
        if self._note:
            line += f" | {self._note}"
        try:
            if self._terminal:
                self._stream.write("\r\x1b[K" + line[:200] + end)
            else:
                self._stream.write(line + "\n")
            self._stream.flush()
        except OSError:
            to_nowhere(self._stream)


def in_mib(progress: Progress) -> Callable[[int], None]:
    """Advances a progress that counts MiB by bytes, whole MiB at a time."""
    seen = 0

    def advance(count: int) -> None:
        nonlocal seen
        before, seen = seen >> 20, seen + count
        progress.advance((seen >> 20) - before)

    return advance


def to_nowhere(stream: TextIO) -> None:
    """Sends what is still to be shown nowhere: a closed terminal is no reason to stop the work.

    Text that stays unwritten would make the interpreter end with status 120.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def progress_line(label: str, *, done: int, total: int, unit: str, new: int, seconds: float) -> str:
    """`label: done/total unit (percent) | rate | time left`; new: units done in `seconds`.

    A total of 0 is one that is not known.
    """
    line = f"{label}: {done:,} {unit}"
    if total:
        line = f"{label}: {done:,}/{total:,} {unit} ({100 * done / total:.0f} %)"
    if new > 0 and seconds > 0:
        rate = new / seconds
        line += f" | {rate:,.1f} {unit}/s" if rate < 100 else f" | {rate:,.0f} {unit}/s"
        line += f" | {duration((total - done) / rate)} left" if done < total else ""
    return line + f" | {duration(seconds)}"


def duration(seconds: float) -> str:
    """Seconds for people: `1 h 02 min`, `3 min 20 s`, `8 s`."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"
