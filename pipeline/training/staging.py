"""Rows on their way from files to a device: chunks that are read by threads, copied, laid out.

A chunk is one buffer's filling. Its pieces are read at once, it is copied in one go, and each piece
is laid into its tensor on the device. Few buffers of one size serve packs of any size.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.store.index import Entry, tensor_bytes
from pipeline.store.rows import DIRECT_ALIGNMENT, RowFiles, Rows

CHUNK_BYTES = (32 << 20) - DIRECT_ALIGNMENT
"""Of one buffer: large enough for a copy to reach the bus's speed. With what aligns it, a power of
two, to which page-locked memory is rounded up."""
PIECE_BYTES = 4 << 20
"""Of one read: from here on disks gain nothing, and a chunk still keeps eight threads busy."""

_PLACE_ALIGNMENT = 64  # of a piece in its buffer: views of the bytes as rows must be aligned


@dataclass(frozen=True)
class Piece:
    """Rows of one read: where they lie, and where they go.

    place: byte of the buffer at which the read begins; lead: bytes read before the first row, for
    alignment; room: bytes read, with what follows the last row. column: tap number, None for final.
    at: first row of the tensor they go to.
    """

    rows: Rows
    place: int
    lead: int
    room: int
    column: int | None
    at: int


@dataclass(frozen=True)
class Part:
    """A run of consecutive rows of one sample, first counted within it, bound for row `at`."""

    entry: Entry
    first: int
    count: int
    at: int


def parts(rows: Tensor, entries: list[Entry], starts: NDArray[np.int64]) -> list[Part]:
    """The runs in which rising pack rows lie in their samples.

    rows int64 [N] on the CPU; starts [samples]: pack row at which each begins.
    """
    wanted = rows.numpy()
    if len(wanted) == 0:
        return []
    breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
    borders = np.searchsorted(wanted, starts)
    cuts = np.unique(np.concatenate([[0], breaks, borders, [len(wanted)]]))
    firsts = wanted[cuts[:-1]]
    samples = np.searchsorted(starts, firsts, side="right") - 1
    offsets = firsts - starts[samples]
    lines = zip(
        samples.tolist(), offsets.tolist(), np.diff(cuts).tolist(), cuts.tolist(), strict=False
    )
    return [Part(entries[sample], first, count, at) for sample, first, count, at in lines]


def chunks(
    wanted: list[tuple[str, int | None, list[Part]]], files: RowFiles
) -> Iterator[list[Piece]]:
    """Cuts parts of fields (name, column, parts) into pieces, and deals these to buffers."""
    chunk: list[Piece] = []
    place = 0
    for name, column, runs in wanted:
        size = files.row_bytes(name)
        most = max(1, PIECE_BYTES // size)
        for part in runs:
            for done in range(0, part.count, most):
                count = min(most, part.count - done)
                rows = files.rows(part.entry, name, part.first + done, count)
                lead = rows.start % files.alignment
                room = _up(lead + rows.size, files.alignment)
                if place + room > buffer_room(size, alignment=files.alignment):
                    yield chunk
                    chunk, place = [], 0
                chunk.append(Piece(rows, place, lead, room, column, part.at + done))
                place = _up(place + room, max(files.alignment, _PLACE_ALIGNMENT))
    if chunk:
        yield chunk


def buffer_room(row_bytes: int, *, alignment: int) -> int:
    """Bytes of a buffer: CHUNK_BYTES, or more where one row would not fit."""
    return max(CHUNK_BYTES, _up(row_bytes, alignment) + alignment)


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


class Buffer:
    """Memory that one chunk is read into; page-locked for a GPU. Free when `copied` has passed."""

    def __init__(self, *, room: int, pinned: bool) -> None:
        whole = torch.empty(room + DIRECT_ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
        first = -whole.data_ptr() % DIRECT_ALIGNMENT
        self.bytes = whole[first : first + room]
        self.memory = tensor_bytes(self.bytes)
        self.copied: torch.cuda.Event | None = None


class Lane:
    """How tensors get to a device: over a stream of its own on a GPU, at once on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.device = torch.empty(0, device=device).device  # with its number
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def pinned(self) -> bool:
        """Whether copies want page-locked memory."""
        return self._stream is not None

    def enter_thread(self) -> None:
        """To be called first in a thread that will use the lane."""
        if self._stream is not None:
            # A new thread is on GPU 0, where its calls would take memory for a second context.
            torch.cuda.set_device(self.device)

    def queue(self) -> AbstractContextManager[Any]:
        """Inside, copies and new tensors belong to the lane's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self, *, timed: bool = False) -> torch.cuda.Event | None:
        """An event that passes when all that the present stream holds is done; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def bring(self, buffer: Buffer, *, size: int) -> Tensor:
        """The first bytes of a buffer, on the device: uint8 [size]. Only inside `queue`."""
        if self._stream is None:
            return buffer.bytes[:size]
        arrived = buffer.bytes[:size].to(self.device, non_blocking=True)
        buffer.copied = self.mark()
        return arrived

    def hand_over(self, value: Any, *, ready: torch.cuda.Event | None) -> None:
        """Lets the caller's stream use tensors of a dataclass made on the lane's stream."""
        if ready is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(ready)
        for tensor in _tensors(value):
            assert tensor.device == self.device
            # Else the memory could be given away while the caller's stream still reads it.
            tensor.record_stream(stream)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def lay_out(
    chunk: list[Piece], arrived: Tensor, *, taps: Tensor, final: Tensor, width: int
) -> None:
    """Writes a chunk's rows into taps [N, taps * width] and final [S, width], in their dtype."""
    for piece in chunk:
        first = piece.place + piece.lead
        rows = arrived[first : first + piece.rows.size].view(torch.bfloat16).view(-1, width)
        after = piece.at + len(rows)
        if piece.column is None:
            final[piece.at : after].copy_(rows)
        else:
            columns = slice(piece.column * width, (piece.column + 1) * width)
            taps[piece.at : after, columns].copy_(rows)
