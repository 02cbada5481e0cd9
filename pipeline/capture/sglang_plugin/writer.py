"""Staging files: written aside by threads, piece by piece at their place, renamed when whole.

A file is `<rid>.safetensors` with tap_0.., final [n, H] bfloat16 and input_ids [n] int32. While it
grows it is `.<rid>.safetensors.<number>.partial`, reserved in full from the start, so that a full
disk shows before the first row and the quota counts what is promised. A request that fails after
its receipt leaves `<rid>.failed`, JSON with reason and detail.
"""

import fcntl
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.capture.sglang_plugin.request_state import CapturedRequest, Refused
from pipeline.capture.sglang_plugin.ring import Piece

_HEADER_ALIGNMENT = 4096  # tensors start on a page, as in the shards
_POLL_SECONDS = 0.002
_EXPONENT = np.uint16(0x7F80)  # bfloat16: all ones in the exponent means infinite or not a number
# Values checked at a time. Each call gives up Python's lock and must win it back from the
# scheduler, which spins when it has nothing to do: few long calls, not many short ones.
_CHECK_ITEMS = 1 << 21
_SWITCH_SECONDS = 0.0002  # Python's own 0.005 costs a writer that long for every call
_COUNTERS_SECONDS = 1.0


@dataclass
class Counters:
    """What the writers have done: the times are sums over all threads, in seconds.

    requests: those whose end has run. bytes: of rows taken from the ring. cpu: the threads' own
    processor time. room: waiting for the quota. hook and ring: on the forward path, the whole hook
    and the part of it spent waiting for the ring.
    """

    requests: int = 0
    bytes: int = 0
    cpu_seconds: float = 0.0
    room_seconds: float = 0.0
    hook_seconds: float = 0.0
    ring_seconds: float = 0.0


class Room:
    """The bytes that may wait in the staging folder, shared with other processes that write there.

    A partial file has its full size from the start, so the sizes in the folder are the
    reservations; a lock file makes looking and reserving one step.
    """

    def __init__(self, folder: Path, *, quota_bytes: int) -> None:
        self._folder, self._quota = folder, quota_bytes
        self._lock_file = folder / ".quota.lock"
        self._lock_file.touch()
        self._threads = threading.Lock()

    def waiting_bytes(self) -> int:
        """Bytes of whole and partial staging files."""
        total = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                try:
                    if ".safetensors" in entry.name:
                        total += entry.stat().st_size
                except FileNotFoundError:  # taken by the collector meanwhile
                    continue
        return total

    def create(self, path: Path, size: int) -> int | None:
        """A descriptor of the new file with all its bytes reserved; None when there is no room.

        OSError when the disk is full; then no file is left.
        """
        with self._locked():
            if self.waiting_bytes() + size > self._quota:
                return None
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(descriptor, size)
            except OSError:
                os.close(descriptor)
                path.unlink()
                raise
        try:
            # A sparse file on a full tmpfs dies at the write (SIGBUS for maps): reserve for real.
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return descriptor

    def show(self, partial: Path, whole: Path) -> None:
        """Renames a partial file to its final name.

        Under the lock: who counts meanwhile might meet the file under neither name, and the quota
        would be broken by its size.
        """
        with self._locked():
            partial.rename(whole)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads, self._lock_file.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class StagedFile:
    """The file of one request. All methods may be called from any thread."""

    def __init__(
        self, request: CapturedRequest, folder: Path, *, taps: int, width: int, number: int
    ) -> None:
        self.request = request
        self.rows = len(request.ids)
        self._folder = folder
        # Numbered: a request that restarts must not meet its own earlier file.
        self._partial = folder / f".{request.file}.{number}.partial"
        self._names = [*(f"tap_{number}" for number in range(taps)), "final", "input_ids"]
        self._row_bytes = [2 * width] * (taps + 1) + [4]
        self._header, self._offsets = self._layout(width)
        self.size_bytes = self._offsets[-1] + 4 * self.rows
        self._opening, self._state = threading.Lock(), threading.Lock()
        self._descriptor: int | None = None
        self._written = self._busy = 0
        self._closed = self._over = False
        self._failure: Refused | None = None

    def _layout(self, width: int) -> tuple[bytes, list[int]]:
        entries = {}
        at = 0
        starts = []
        for name, row_bytes in zip(self._names, self._row_bytes, strict=True):
            end = at + row_bytes * self.rows
            shape = [self.rows] if name == "input_ids" else [self.rows, width]
            dtype = "I32" if name == "input_ids" else "BF16"
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            starts.append(at)
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        padded = -(8 + len(text)) % _HEADER_ALIGNMENT + len(text)
        header = padded.to_bytes(8, "little") + text.ljust(padded)
        return header, [len(header) + start for start in starts]

    def write(
        self, piece: Piece, *, room: Room, timeout_seconds: float, scratch: NDArray[np.uint16]
    ) -> float:
        """Checks the rows and writes them at their place; a fault fails the whole request.

        Gives the seconds spent waiting for room.
        """
        with self._state:
            if self._over:
                return 0.0
            self._busy += 1
        waited = 0.0
        try:
            wrong = check_piece(piece, self.request.ids, scratch=scratch)
            if wrong is not None:
                self.fail(wrong)
                return waited
            waited = self._open(room, timeout_seconds)
            if self._descriptor is not None:
                arrays: list[NDArray[Any]] = [*piece.states, piece.ids]
                for array, row_bytes, offset in zip(
                    arrays, self._row_bytes, self._offsets, strict=True
                ):
                    _write_all(
                        self._descriptor,
                        array.data.cast("B"),
                        offset + row_bytes * piece.position,
                    )
                with self._state:
                    self._written += piece.rows
                self.finish(room)
        except (OSError, ValueError) as error:
            self.fail(Refused("io", f"{type(error).__name__}: {error}"))
        finally:
            with self._state:
                self._busy -= 1
                self._let_go()
        return waited

    def _open(self, room: Room, timeout_seconds: float) -> float:
        began = time.monotonic()
        with self._opening:
            while self._descriptor is None and not self._over:
                descriptor = room.create(self._partial, self.size_bytes)
                if descriptor is not None:
                    _write_all(descriptor, memoryview(self._header), 0)
                    self._descriptor = descriptor
                    break
                if time.monotonic() - began > timeout_seconds:
                    raise TimeoutError(
                        f"no room for {self.size_bytes} bytes in {timeout_seconds:g} s"
                    )
                time.sleep(_POLL_SECONDS)
        return time.monotonic() - began

    def close(self) -> Refused | None:
        """The request's end has run: gives its failure, if any, else lets the file finish."""
        with self._state:
            self._closed = True
            return self._failure

    def finish(self, room: Room) -> bool:
        """Renames the file if it is closed and whole; true when this call did it."""
        with self._state:
            if self._over or not self._closed or self._written != self.rows:
                return False
            room.show(self._partial, self._folder / self.request.file)
            self._over = True
            self._let_go()
            return True

    def fail(self, why: Refused) -> None:
        """Gives the request up; when its receipt is out already, leaves the .failed file."""
        with self._state:
            if self._over:
                return
            self._failure, self._over = why, True
            if self._closed:
                final = self._folder / f"{self.request.rid}.failed"
                aside = self._folder / f".{self.request.rid}.failing"
                aside.write_text(json.dumps({"reason": why.reason, "detail": why.detail}))
                aside.rename(final)
            self._let_go()

    def discard(self, why: Refused) -> None:
        """The request is refused on the forward path: whatever was written goes."""
        with self._state:
            self._over = True
            self._failure = self._failure or why
            self._let_go()

    def _let_go(self) -> None:
        # Never while a thread writes: the number of a closed descriptor is soon another file's.
        if self._over and self._busy == 0 and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._partial.unlink(missing_ok=True)


def check_piece(
    piece: Piece, ids: NDArray[np.int32], *, scratch: NDArray[np.uint16]
) -> Refused | None:
    """Compares the token ids that ran with the request's, and looks for values not finite.

    scratch: any number of values; the states are gone through that many at a time.
    """
    wanted = ids[piece.position : piece.position + piece.rows]
    if not np.array_equal(piece.ids, wanted):
        at = int(np.argmax(piece.ids != wanted)) if len(wanted) == piece.rows else 0
        return Refused("other_ids", f"row {piece.position + at}: the forward ran another token id")
    step = len(scratch)
    for number, state in enumerate(piece.states):
        values = state.reshape(-1)
        for start in range(0, len(values), step):
            part = values[start : start + step]
            exponents = np.bitwise_and(part, _EXPONENT, out=scratch[: len(part)])
            if exponents.max() == _EXPONENT:
                at = start + int(np.argmax(exponents == _EXPONENT))
                row = piece.position + at // state.shape[1]
                name = f"tap_{number}" if number < len(piece.states) - 1 else "final"
                return Refused("not_finite", f"{name} row {row} is not finite")
    return None


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


class Writer:
    """Threads that take pieces to files. Each queued piece holds ring memory: that is the bound."""

    def __init__(
        self, folder: Path, *, quota_bytes: int, threads: int, timeout_seconds: float
    ) -> None:
        self.counters = Counters()
        self._folder, self._timeout = folder, timeout_seconds
        self._room = Room(folder, quota_bytes=quota_bytes)
        self._quota = quota_bytes
        self._work: queue.SimpleQueue[tuple[StagedFile, Piece | None] | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._counted_at = 0.0
        self._opened = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"capture-writer-{number}", daemon=True)
            for number in range(threads)
        ]
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        for thread in self._threads:
            thread.start()

    def open(self, request: CapturedRequest, *, taps: int, width: int) -> StagedFile | Refused:
        """The file of a new request; refused when it alone exceeds the quota."""
        self._opened += 1
        file = StagedFile(request, self._folder, taps=taps, width=width, number=self._opened)
        if file.size_bytes > self._quota:
            detail = f"{file.size_bytes} bytes; the staging quota is {self._quota}"
            return Refused("io", detail)
        return file

    def put(self, file: StagedFile, piece: Piece) -> None:
        """Hands over a piece, which is released when it is written or its file is over."""
        self._work.put((file, piece))

    def close(self, file: StagedFile) -> Refused | None:
        """After a request's last piece: its failure so far, if any; else it finishes by itself."""
        failure = file.close()
        self._work.put((file, None))
        return failure

    def stop(self) -> None:
        """Writes what is queued, then ends the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._write_counters()

    def _run(self) -> None:
        scratch = np.empty(_CHECK_ITEMS, dtype=np.uint16)
        while (item := self._work.get()) is not None:
            file, piece = item
            began = time.thread_time()
            waited = 0.0
            if piece is None:
                file.finish(self._room)
            else:
                piece.wait()
                try:
                    waited = file.write(
                        piece, room=self._room, timeout_seconds=self._timeout, scratch=scratch
                    )
                finally:
                    piece.release()
            with self._counting:
                counters = self.counters
                counters.cpu_seconds += time.thread_time() - began
                counters.room_seconds += waited
                if piece is None:
                    counters.requests += 1
                else:
                    counters.bytes += piece.nbytes
                now = time.monotonic()
                due = now - self._counted_at > _COUNTERS_SECONDS or self._work.empty()
                if due:
                    self._counted_at = now
            if due:
                self._write_counters()

    def _write_counters(self) -> None:
        with self._counting:
            text = json.dumps(asdict(self.counters))
            aside = self._folder / f".counters-{os.getpid()}.partial"
            try:
                aside.write_text(text)
                aside.rename(self._folder / f".counters-{os.getpid()}.json")
            except OSError:  # a full disk; the requests say so themselves
                return
