"""The ring of memory between the device and the writers.

One block is taken at the start and never grows. A region is contiguous; regions are taken in order
and given back in any order; the space is free again once all earlier regions are back too. Taking
waits: this is where back-pressure reaches the server.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_BYTES = 512
_BLOCK_BYTES = 32 << 20  # large enough for full PCIe speed, small enough to share among writers


@dataclass(eq=False)
class Region:
    """Bytes [start, start + size) of the ring's block; end counts bytes taken since the start."""

    start: int
    size: int
    end: int
    back: bool = False


class Ring:
    """Hands out regions of `size_bytes` bytes. Any thread may take and give back."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._head = self._tail = 0  # both only rise; their difference is what is taken
        self._live: deque[Region] = deque()
        self._changed = threading.Condition()

    @property
    def taken_bytes(self) -> int:
        """Bytes not free, those lost at the wrap included."""
        with self._changed:
            return self._head - self._tail

    def take(self, wanted_bytes: int, *, timeout_seconds: float) -> Region:
        """A region, as soon as there is one. TimeoutError; ValueError if it can never fit."""
        size = -(-wanted_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if size > self.size_bytes:
            raise ValueError(f"{size} bytes at once; the ring has {self.size_bytes}")
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while True:
                if not self._live:
                    self._head = self._tail = 0
                start = self._head % self.size_bytes
                lost = self.size_bytes - start if start + size > self.size_bytes else 0
                if self._head + lost + size - self._tail <= self.size_bytes:
                    break
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"no {size} free bytes in {timeout_seconds:g} s")
            self._head += lost + size
            region = Region((start + lost) % self.size_bytes, size, self._head)
            self._live.append(region)
            return region

    def give_back(self, region: Region) -> None:
        """Frees a region. ValueError for one that is already back."""
        with self._changed:
            if region.back:
                raise ValueError("region given back twice")
            region.back = True
            while self._live and self._live[0].back:
                self._tail = self._live.popleft().end
            self._changed.notify_all()


@dataclass(eq=False)
class Piece:
    """Copied rows of one request, valid from `wait` until `release`.

    states: one array per tap and the final state, [rows, H] bfloat16 as its bits (uint16).
    ids: [rows] int32, the token ids that the forward ran on.
    """

    position: int
    rows: int
    states: tuple[NDArray[np.uint16], ...]
    ids: NDArray[np.int32]
    _ring: Ring
    _region: Region
    _copied: Any = field(default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return sum(state.nbytes for state in self.states) + self.ids.nbytes

    def wait(self) -> None:
        """Waits until the copies have arrived. Other threads run meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()

    def release(self) -> None:
        """Gives the memory back; the arrays must not be read any more."""
        self._ring.give_back(self._region)


class StateCopier:
    """Copies rows of states into the ring, on a stream of its own where the device has streams."""

    def __init__(self, ring_bytes: int, *, device: torch.device) -> None:
        self._ring = Ring(ring_bytes)
        self._cuda = device.type == "cuda"
        self._memory = torch.empty(ring_bytes, dtype=torch.uint8, pin_memory=self._cuda)
        self._bytes = self._memory.numpy()
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self.waited_seconds = 0.0

    def ready(self, states: Sequence[Tensor], ids: Tensor) -> None:
        """Once for each forward batch, on the stream that computed it, before its pieces.

        The tensors are kept from reuse by the allocator until their copies are done, without being
        held here; SGLang writes none of them again (0.5.17 and 0.5.23: a fresh tensor a forward,
        static buffers only inside CUDA graphs, which extraction turns off).
        """
        if self._cuda:
            self._stream.wait_stream(torch.cuda.current_stream())
            for tensor in (*states, ids):
                tensor.record_stream(self._stream)

    def rows_per_piece(self, row_bytes: int) -> int:
        """The most rows to copy as one piece."""
        return max(1, min(_BLOCK_BYTES, self._ring.size_bytes // 4) // row_bytes)

    def copy(
        self,
        states: Sequence[Tensor],
        ids: Tensor,
        *,
        first_row: int,
        position: int,
        rows: int,
        timeout_seconds: float,
    ) -> Piece:
        """Starts the copies of rows [first_row, first_row + rows) of states [T, H] and ids [T].

        Waits for room only. TimeoutError and ValueError as `Ring.take`.
        """
        width = states[0].shape[1]
        state_bytes, ids_bytes = 2 * rows * width, 4 * rows
        began = time.monotonic()
        region = self._ring.take(
            state_bytes * len(states) + ids_bytes, timeout_seconds=timeout_seconds
        )
        self.waited_seconds += time.monotonic() - began
        places = [
            (region.start + number * state_bytes, state_bytes) for number in range(len(states))
        ]
        places.append((region.start + len(states) * state_bytes, ids_bytes))
        copied = None
        if self._cuda:
            with torch.cuda.stream(self._stream):
                self._start(states, ids, places, first_row, rows)
                # Blocking: a writer that waits sleeps instead of spinning on a core.
                copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                copied.record()
        else:
            self._start(states, ids, places, first_row, rows)
        views = [self._bytes[start : start + size] for start, size in places]
        return Piece(
            position,
            rows,
            tuple(view.view(np.uint16).reshape(rows, width) for view in views[:-1]),
            views[-1].view(np.int32),
            self._ring,
            region,
            copied,
        )

    def _start(
        self,
        states: Sequence[Tensor],
        ids: Tensor,
        places: Sequence[tuple[int, int]],
        first_row: int,
        rows: int,
    ) -> None:
        for tensor, (start, size) in zip((*states, ids), places, strict=True):
            dtype = torch.int32 if tensor is ids else torch.bfloat16
            source = tensor[first_row : first_row + rows]
            target = self._memory[start : start + size].view(dtype).view(source.shape)
            target.copy_(source, non_blocking=True)
