"""The way of packs from plans to the device: chunks read by threads, a few in flight at once."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pipeline.draft.chain import ChainPlan
from pipeline.draft.ttt import Pack
from pipeline.store.rows import RowFiles
from pipeline.training.flow import FlowMeter
from pipeline.training.staging import Buffer, Lane, Piece, buffer_room, lay_out

_BUFFERS = 4  # two being read, one being copied, one to be filled next

Order = TypeVar("Order")


@dataclass(frozen=True, eq=False)
class PlannedPack:
    """What is known of a pack before its states are read: plan and ids int64 [T], on the CPU.

    chunks: the pieces to be read, one buffer's filling after the other.
    """

    plan: ChainPlan
    ids: Tensor
    chunks: Iterator[list[Piece]]


@dataclass(frozen=True)
class LandedPack:
    """A pack on the device. size: bytes read for it. copied: passes when the pack is whole."""

    pack: Pack
    size: int
    copied: torch.cuda.Event | None


@dataclass
class _Making:
    """A pack under way; its tensors appear with the first rows."""

    planned: PlannedPack
    pack: Pack | None = None
    size: int = 0


@dataclass
class _Flight:
    """A chunk whose pieces are being read. buffer is None for a pack without any rows."""

    making: _Making
    chunk: list[Piece]
    buffer: Buffer | None
    reads: list[Future[None]]
    last: bool


class PackStream(Generic[Order]):
    """Packs of orders, one after the other, by threads of its own: close `run` when done.

    plan: makes the plan of an order. width, taps: H and number of the taps; dtype: of the states on
    the device. threads: that read at once. Ends early, within a pack too, once `stop` is set.
    """

    def __init__(
        self,
        plan: Callable[[Order], PlannedPack],
        *,
        files: RowFiles,
        lane: Lane,
        width: int,
        taps: int,
        dtype: torch.dtype,
        threads: int,
        meter: FlowMeter,
        stop: threading.Event,
    ) -> None:
        self._plan, self._files, self._lane = plan, files, lane
        self._width, self._taps, self._dtype = width, taps, dtype
        self._threads, self._meter, self._stop = threads, meter, stop
        self._room = buffer_room(files.row_bytes("final"), alignment=files.alignment)
        self._flights: deque[_Flight] = deque()
        self._buffers: deque[Buffer] = deque()

    def run(self, orders: Iterable[Order]) -> Generator[LandedPack, None, None]:
        """Packs in the order asked for. Reads run ahead of what is taken by a few chunks."""
        planner = ThreadPoolExecutor(1, thread_name_prefix="packs-plan")
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="packs-read")
        flights = self._flights
        try:
            for plan in self._plans(orders, planner):
                try:
                    making = _Making(plan.result())
                except Exception:
                    while flights:  # the packs before it are whole, and come first
                        yield from self._finish(flights.popleft())
                    raise
                yield from self._start(making, pool)
                # What is read already need not wait for the next plan.
                while flights and all(read.done() for read in flights[0].reads):
                    yield from self._finish(flights.popleft())
            while flights and not self._stop.is_set():
                yield from self._finish(flights.popleft())
        finally:
            for threads in (planner, pool):
                threads.shutdown(wait=True, cancel_futures=True)

    def _plans(
        self, orders: Iterable[Order], planner: ThreadPoolExecutor
    ) -> Iterator[Future[PlannedPack]]:
        """The orders' plans, each made while the rows of the pack before it are read."""
        last: Future[PlannedPack] | None = None
        for order in orders:
            if self._stop.is_set():
                return
            plan = planner.submit(self._plan, order)
            if last is not None:
                yield last
            last = plan
        if last is not None:
            yield last

    def _start(self, making: _Making, pool: ThreadPoolExecutor) -> Iterator[LandedPack]:
        """Sets all reads of a pack going, as buffers get free; yields packs that end meanwhile."""
        chunk: list[Piece] | None = next(making.planned.chunks, [])
        while chunk is not None and not self._stop.is_set():
            following = next(making.planned.chunks, None)
            while len(self._flights) >= _BUFFERS:
                yield from self._finish(self._flights.popleft())
            buffer = self._buffer() if chunk else None
            reads = [
                pool.submit(self._read, piece, buffer) for piece in chunk if buffer is not None
            ]
            self._flights.append(_Flight(making, chunk, buffer, reads, last=following is None))
            chunk = following

    def _read(self, piece: Piece, buffer: Buffer) -> None:
        began = time.perf_counter()
        memory = buffer.memory[piece.place : piece.place + piece.room]
        self._files.read(piece.rows, memory)
        self._meter.read(piece.room, seconds=time.perf_counter() - began)

    def _finish(self, flight: _Flight) -> Iterator[LandedPack]:
        """Waits for a chunk's reads and queues its way to the device; yields a pack it ends."""
        for read in flight.reads:
            read.result()
        making = flight.making
        with self._lane.queue():
            pack = making.pack = making.pack or self._allocate(making.planned)
            if flight.buffer is not None:
                end = flight.chunk[-1].place + flight.chunk[-1].room
                arrived = self._lane.bring(flight.buffer, size=end)
                lay_out(flight.chunk, arrived, taps=pack.taps, final=pack.final, width=self._width)
                self._buffers.append(flight.buffer)
                making.size += sum(piece.room for piece in flight.chunk)
            copied = self._lane.mark() if flight.last else None
        if flight.last:
            yield LandedPack(pack, making.size, copied)

    def _allocate(self, planned: PlannedPack) -> Pack:
        """The pack on the device, its states still to be filled. Only inside the lane's queue."""
        device, plan, ids = self._lane.device, planned.plan, planned.ids
        keys, teachers = len(plan.keys), len(plan.teachers)
        if self._lane.pinned:
            plan = plan.pinned().to(device)
            ids = ids.pin_memory().to(device, non_blocking=True)
        taps = torch.empty(keys, self._taps * self._width, dtype=self._dtype, device=device)
        final = torch.empty(teachers, self._width, dtype=self._dtype, device=device)
        return Pack(plan, ids, taps, final)

    def _buffer(self) -> Buffer:
        """A buffer that nothing reads any more; new ones only until there are enough."""
        if not self._buffers:
            return Buffer(room=self._room, pinned=self._lane.pinned)
        buffer = self._buffers.popleft()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer
