"""How data flowed from the disk: what the consumer wanted, and what it got."""

import threading
import time
from dataclasses import dataclass

_MUCH_WAITING = 0.02


@dataclass(frozen=True)
class Flow:
    """One stretch of time.

    seconds: its length. taken_bytes: of the packs that the consumer took. read_bytes: that the
    reading threads read, also for packs to come. reading_seconds: summed over these threads.
    waited_seconds: the consumer's (on a GPU: the time its stream stood still for want of a pack).
    """

    seconds: float
    taken_bytes: int
    read_bytes: int
    reading_seconds: float
    waited_seconds: float
    threads: int

    @property
    def waiting(self) -> float:
        """Share of the time that the consumer waited for data, 0 to 1."""
        return min(1.0, self.waited_seconds / self.seconds) if self.seconds > 0 else 0.0

    @property
    def got(self) -> float:
        """MB (10**6 bytes) a second that the consumer took."""
        return self.taken_bytes / 1e6 / self.seconds if self.seconds > 0 else 0.0

    @property
    def wanted(self) -> float:
        """MB a second that the consumer would have taken, had it never waited."""
        working = self.seconds - self.waited_seconds
        return self.taken_bytes / 1e6 / working if working > 0 else self.got

    @property
    def reading(self) -> float:
        """Share of the time that the reading threads were busy, 0 to 1; near 1: a slow disk."""
        time_of_all = self.seconds * self.threads
        return min(1.0, self.reading_seconds / time_of_all) if time_of_all > 0 else 0.0

    def line(self) -> str | None:
        """What to say on screen when the consumer waited over 2 % of the time; else None."""
        if self.waiting <= _MUCH_WAITING:
            return None
        return (
            f"data: waited {self.waiting:.0%} of the time: {self.wanted:,.0f} MB/s wanted, "
            f"{self.got:,.0f} MB/s got (readers busy {self.reading:.0%})"
        )


class FlowMeter:
    """Adds up a flow from several threads."""

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._taken = self._read = 0
        self._reading = self._waited = 0.0

    def read(self, size: int, *, seconds: float) -> None:
        """A thread read `size` bytes."""
        with self._lock:
            self._read += size
            self._reading += seconds

    def took(self, size: int) -> None:
        """The consumer took a pack for which `size` bytes had been read."""
        with self._lock:
            self._taken += size

    def waited(self, seconds: float) -> None:
        """The consumer waited."""
        with self._lock:
            self._waited += seconds

    def flow(self) -> Flow:
        """The flow since the last call; the next begins now."""
        now = time.perf_counter()
        with self._lock:
            flow = Flow(
                now - self._began,
                self._taken,
                self._read,
                self._reading,
                self._waited,
                self._threads,
            )
            self._began, self._taken, self._read = now, 0, 0
            self._reading = self._waited = 0.0
        return flow
