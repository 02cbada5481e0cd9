"""Processes that tests look at while they come and go."""

import signal
import time
from collections.abc import Iterable

import psutil


def below(pid: int, word: str = "") -> list[psutil.Process]:
    """Descendants of a process whose command line holds the word; [] of one that is gone."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [one for one in found if word in command_line(one)]


def command_line(process: psutil.Process) -> str:
    """Its words; "" of one that is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def alive(processes: Iterable[psutil.Process | int]) -> list[psutil.Process | int]:
    """Those that still run; a dead one that nobody has waited for does not."""
    return [one for one in processes if _runs(one)]


def await_ends(processes: Iterable[psutil.Process | int], *, within: float) -> None:
    """All of them end within so many seconds. AssertionError with those that do not."""
    processes = list(processes)
    deadline = time.monotonic() + within
    while left := alive(processes):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def hear_ctrl_c() -> None:
    """For a child, before its program: one of a runner in the background would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _runs(process: psutil.Process | int) -> bool:
    try:
        one = psutil.Process(process) if isinstance(process, int) else process
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
