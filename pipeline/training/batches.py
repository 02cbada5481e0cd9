"""Packs on the device, made ready ahead of the loop: only the rows that the loss reads.

In the background one thread reads ids and masks of the next pack and plans it, a few read the
wanted rows straight into page-locked buffers, and a stream of its own copies these to the GPU.
Reads of a pack begin before the last of the one before it are copied, so the disk is never let
rest. Memory is bounded by the buffers and the packs in flight, whatever the dataset's size.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.draft.chain import chain_weight, plan_chains
from pipeline.draft.ttt import Pack
from pipeline.store.index import Entry, tensor_bytes
from pipeline.store.reader import StateDataset
from pipeline.training.errors import TrainingError
from pipeline.training.flow import Flow, FlowMeter
from pipeline.training.packs import Indices
from pipeline.training.staging import Lane, Part, chunks, parts
from pipeline.training.stream import PackStream, PlannedPack

_WAITING = 1  # packs made and not taken; one more may be in the thread's hand
_SMALL = {"input_ids": torch.int32, "supervised": torch.bool}


@dataclass(frozen=True)
class PackOrder:
    """A pack to be made: its samples, and with the first pack of a step that step's other packs.

    weigh: all packs of the step, over all ranks, whose summed weight is wanted; empty otherwise.
    """

    samples: Indices
    weigh: tuple[Indices, ...] = ()


@dataclass(frozen=True)
class ReadyPack:
    """A pack on the device with its samples' indices.

    step_weight: summed weight of `weigh`, None if empty. size: bytes of states read for it.
    copied: passes when the pack is whole; whoever takes it has had its stream wait for that.
    """

    pack: Pack
    samples: Indices
    step_weight: float | None
    size: int
    copied: torch.cuda.Event | None = None


class PackReader:
    """Makes packs out of a dataset.

    dtype: of taps and final, the compute dtype. vocabulary_size: V of the target. steps, decay: of
    the loss. threads: that read at once. direct: past the page cache, None: when the dataset is
    larger than half of the memory.
    """

    def __init__(
        self,
        dataset: StateDataset,
        *,
        dtype: torch.dtype,
        vocabulary_size: int,
        steps: int,
        decay: float,
        device: torch.device | None = None,
        threads: int = 8,
        direct: bool | None = None,
    ) -> None:
        self._dataset, self._dtype, self._threads = dataset, dtype, threads
        self._steps, self._decay = steps, decay
        self._vocabulary_size = vocabulary_size
        self._lane = Lane(device or torch.device("cpu"))
        self._files = dataset.row_files(direct=direct)

    def names(self, samples: Indices, *, most: int = 8) -> str:
        """Sample ids for a message: at most `most`, then how many more."""
        shown = ", ".join(self._dataset.entries[i].id for i in samples[:most].tolist())
        return shown + (f" and {len(samples) - most} more" if len(samples) > most else "")

    def read(self, samples: Indices) -> Pack:
        """One pack on the device, its samples end to end; ready for the present stream."""
        return self.make(PackOrder(samples)).pack

    def weight(self, samples: Indices) -> float:
        """Weight of a pack from its masks alone."""
        entries = self._entries(samples)
        document, _ = _borders(entries)
        mask = self._small(entries, "supervised")
        return chain_weight(mask, document, steps=self._steps, decay=self._decay)

    def make(self, order: PackOrder) -> ReadyPack:
        """Fulfils one order, for the present stream."""
        made = self.stream([order], meter=self.meter(), stop=threading.Event())
        with closing(made):
            ready = next(made)
        self.hand_over(ready)
        return ready

    def meter(self) -> FlowMeter:
        """A meter for one stream of packs."""
        return FlowMeter(threads=self._threads)

    def mark(self) -> torch.cuda.Event | None:
        """An event with a time, at the present end of the caller's stream; None on a CPU."""
        return self._lane.mark(timed=True)

    def enter_thread(self) -> None:
        """To be called first in a thread that will run `stream`."""
        self._lane.enter_thread()

    def hand_over(self, ready: ReadyPack) -> None:
        """Has the present stream wait until the pack is whole, and keeps its memory for it."""
        self._lane.hand_over(ready.pack, ready=ready.copied)

    def stream(
        self, orders: Iterable[PackOrder], *, meter: FlowMeter, stop: threading.Event
    ) -> Generator[ReadyPack, None, None]:
        """Packs in the order asked for; each is to be given to `hand_over` by its user.

        Close it, for its threads; it ends early, within a pack too, once `stop` is set.
        """
        planned: deque[tuple[Indices, float | None]] = deque()

        def plan(order: PackOrder) -> PlannedPack:
            made = self._plan(order)
            weights = [self.weight(samples) for samples in order.weigh]
            planned.append((order.samples, sum(weights) if order.weigh else None))
            return made

        packs = PackStream(
            plan,
            files=self._files,
            lane=self._lane,
            width=self._dataset.hidden_size,
            taps=len(self._dataset.taps),
            dtype=self._dtype,
            threads=self._threads,
            meter=meter,
            stop=stop,
        )
        with closing(packs.run(orders)) as landed:
            for pack in landed:
                yield ReadyPack(pack.pack, *planned.popleft(), pack.size, pack.copied)

    def _plan(self, order: PackOrder) -> PlannedPack:
        """Ids, masks and plan of a pack; no state is read yet."""
        entries = self._entries(order.samples)
        document, starts = _borders(entries)
        ids = self._small(entries, "input_ids")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary_size:
            raise TrainingError(
                f"samples {self.names(order.samples)}: token ids {int(ids.min())} to "
                f"{int(ids.max())}",
                wanted=f"ids below the target's vocabulary of {self._vocabulary_size}",
                next_step="prepare with the target's own tokenizer: make prepare",
            )
        mask = self._small(entries, "supervised")
        plan = plan_chains(mask, document, steps=self._steps, decay=self._decay)
        keys = parts(plan.keys, entries, starts)
        wanted: list[tuple[str, int | None, list[Part]]] = [
            (f"tap_{number}", number, keys) for number in range(len(self._dataset.taps))
        ]
        wanted.append(("final", None, parts(plan.teachers, entries, starts)))
        pieces = chunks(wanted, self._files)
        return PlannedPack(plan, ids.long(), pieces)

    def _entries(self, samples: Indices) -> list[Entry]:
        return [self._dataset.entries[i] for i in samples.tolist()]

    def _small(self, entries: list[Entry], name: str) -> Tensor:
        """A field without width, of samples end to end."""
        total = sum(entry.length for entry in entries)
        found = torch.empty(total, dtype=_SMALL[name])
        memory = tensor_bytes(found)
        rows = [self._files.rows(entry, name, 0, entry.length) for entry in entries]
        for one in rows:
            self._files.announce(one)
        start = 0
        for one in rows:
            self._files.read_cached(one, memory[start : start + one.size])
            start += one.size
        return found


def _borders(entries: list[Entry]) -> tuple[Tensor, Indices]:
    """Of samples end to end: document int64 [T], the sample of a row; starts int64 [samples]."""
    sizes = torch.tensor([entry.length for entry in entries])
    document = torch.repeat_interleave(torch.arange(len(entries)), sizes)
    return document, (torch.cumsum(sizes, 0) - sizes).numpy()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class PacksAhead:
    """Packs as they become ready, and how the data flowed; made by `packs_ahead`."""

    def __init__(self, reader: PackReader, orders: Iterable[PackOrder]) -> None:
        self._reader, self._orders = reader, orders
        self._ready: queue.Queue[ReadyPack | _Failure | None] = queue.Queue(maxsize=_WAITING)
        self._stop = threading.Event()
        self._meter = reader.meter()
        self._ended = self._started = False
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._thread = threading.Thread(target=self._work, name="packs-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> "PacksAhead":
        return self

    def __next__(self) -> ReadyPack:
        """The next pack, for the present stream. An error of the thread is raised here."""
        if self._ended:
            raise StopIteration
        before, began = self._reader.mark(), time.perf_counter()
        item = self._ready.get()
        if not isinstance(item, ReadyPack):
            self._ended = True
            if item is None:
                raise StopIteration
            raise item.error
        self._reader.hand_over(item)
        after = self._reader.mark()
        if not self._started:
            self._started = True
            self._meter.flow()  # the first pack is always waited for: time counts from here
        elif before is None or after is None:
            self._meter.waited(time.perf_counter() - began)
        else:
            self._waits.append((before, after))
            self._count_waits()
        self._meter.took(item.size)
        return item

    def flow(self) -> Flow:
        """How the data flowed since this was last asked, or since the first pack was taken."""
        self._count_waits()
        return self._meter.flow()

    def _count_waits(self) -> None:
        """Of a GPU: between these events its stream had nothing to do but wait for the pack."""
        while self._waits and self._waits[0][1].query():  # type: ignore[no-untyped-call]
            before, after = self._waits.popleft()
            self._meter.waited(before.elapsed_time(after) / 1e3)

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._reader.enter_thread()
            made = self._reader.stream(self._orders, meter=self._meter, stop=self._stop)
            with closing(made):
                for ready in made:
                    self._put(ready)
            self._put(None)
        except BaseException as error:
            self._put(_Failure(error))

    def _put(self, item: ReadyPack | _Failure | None) -> None:
        # After `close` at most one put is past this line, and `close` makes room for it.
        if not self._stop.is_set():
            self._ready.put(item)


@contextmanager
def packs_ahead(reader: PackReader, orders: Iterable[PackOrder]) -> Iterator[PacksAhead]:
    """Packs in the order asked for, made by a background thread that ends with the context.

    An error of the thread is raised where its pack is taken.
    """
    packs = PacksAhead(reader, orders)
    try:
        yield packs
    finally:
        packs.close()
