"""Bounds on memory and time for work that is done with what a stranger wrote."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

_STATM = Path("/proc/self/statm")


@contextmanager
def limited_memory(room_bytes: int) -> Iterator[None]:
    """Inside, this process can ask for so much more than it has; beyond that is a MemoryError."""
    pages = int(_STATM.read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + room_bytes
    try:
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Beside:
    """A thread that does one thing after the other for another one."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self.done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        # A daemon: what never ends does not keep its process from its end.
        Thread(target=self._work, name="bounded work", daemon=True).start()

    def _work(self) -> None:
        while True:
            work = self.asked.get()
            try:
                self.done.put((work(), None))
            except BaseException as error:
                self.done.put((None, error))


_beside: _Beside | None = None  # the one that has nothing to do


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` gives or raises; TimeoutError when it takes longer, and it is left to itself.

    For work that no signal interrupts, as that of a library in another language; it must let other
    threads run. To be called in one thread of a process.
    """
    global _beside
    beside, _beside = _beside or _Beside(), None
    beside.asked.put(work)
    try:
        value, error = beside.done.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"not done in {seconds:.0f} s") from None
    _beside = beside
    if error is not None:
        raise error
    return value


def _forget() -> None:
    global _beside
    _beside = None


os.register_at_fork(after_in_child=_forget)  # a child has the one thread that forked
