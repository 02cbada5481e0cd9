"""Packs as tensors: rows gathered from mapped shards, made ready ahead of the loop.

One background thread keeps at most two finished packs waiting. Rows are copied sample by sample
out of the map, so memory is bounded by the packs in flight, whatever the dataset's size.
"""

import dataclasses
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.draft.ttt import Pack, pack_weight
from pipeline.store.reader import StateDataset
from pipeline.training.errors import TrainingError
from pipeline.training.packs import Indices

_WAITING = 2
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class PackOrder:
    """A pack to be made: its samples, and with the first pack of a step that step's other packs.

    weigh: all packs of the step, over all ranks, whose summed weight is wanted; empty otherwise.
    """

    samples: Indices
    weigh: tuple[Indices, ...] = ()


@dataclass(frozen=True)
class ReadyPack:
    """A pack with its samples' indices; step_weight: summed weight of `weigh`, None if empty."""

    pack: Pack
    samples: Indices
    step_weight: float | None


class PackReader:
    """Makes packs out of a dataset.

    dtype: of taps and final, the compute dtype. vocabulary_size: V of the target. steps, decay: of
    the loss, for weights. pinned: page-locked memory, so that the copy to a GPU does not block.
    """

    def __init__(
        self,
        dataset: StateDataset,
        *,
        dtype: torch.dtype,
        vocabulary_size: int,
        steps: int,
        decay: float,
        pinned: bool = False,
    ) -> None:
        self._dataset, self._dtype, self._pinned = dataset, dtype, pinned
        self._steps, self._decay = steps, decay
        self._vocabulary_size = vocabulary_size

    def names(self, samples: Indices, *, most: int = 8) -> str:
        """Sample ids for a message: at most `most`, then how many more."""
        shown = ", ".join(self._dataset.entries[i].id for i in samples[:most].tolist())
        return shown + (f" and {len(samples) - most} more" if len(samples) > most else "")

    def read(self, samples: Indices) -> Pack:
        """One pack on the CPU, its samples end to end. ids int64; see `Pack` for the shapes."""
        entries = [self._dataset.entries[i] for i in samples.tolist()]
        document, position = _borders([entry.length for entry in entries])
        T, H, taps = len(document), self._dataset.hidden_size, len(self._dataset.taps)
        ids = torch.empty(T, dtype=torch.int64, pin_memory=self._pinned)
        mask = torch.empty(T, dtype=torch.bool, pin_memory=self._pinned)
        tapped = torch.empty(T, taps * H, dtype=self._dtype, pin_memory=self._pinned)
        final = torch.empty(T, H, dtype=self._dtype, pin_memory=self._pinned)
        start = 0
        for entry in entries:
            states = self._dataset.read(entry)
            rows = slice(start, start + entry.length)
            ids[rows].copy_(states.input_ids)
            mask[rows].copy_(states.supervised)
            final[rows].copy_(states.final)
            for number, tap in enumerate(states.taps):
                tapped[rows, number * H : (number + 1) * H].copy_(tap)
            start += entry.length
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary_size:
            raise TrainingError(
                f"samples {self.names(samples)}: token ids {int(ids.min())} to {int(ids.max())}",
                wanted=f"ids below the target's vocabulary of {self._vocabulary_size}",
                next_step="prepare with the target's own tokenizer: make prepare",
            )
        return Pack(ids, tapped, final, mask, document, position)

    def weight(self, samples: Indices) -> float:
        """Weight of a pack from its masks alone: the mask pages are all that is read."""
        entries = [self._dataset.entries[i] for i in samples.tolist()]
        document, _ = _borders([entry.length for entry in entries])
        mask = torch.cat([self._dataset.read(entry).supervised for entry in entries])
        return pack_weight(mask, document, steps=self._steps, decay=self._decay)

    def make(self, order: PackOrder) -> ReadyPack:
        """Fulfils one order."""
        weight = sum(self.weight(samples) for samples in order.weigh) if order.weigh else None
        return ReadyPack(self.read(order.samples), order.samples, weight)


def _borders(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Document number and position within it, both int64 [T], of samples laid end to end."""
    sizes = torch.tensor(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    starts = torch.cumsum(sizes, 0) - sizes
    return document, torch.arange(len(document)) - starts[document]


def move(pack: Pack, device: torch.device) -> Pack:
    """The pack on a device; the same one when it is there already."""
    if device.type == "cpu":
        return pack
    return dataclasses.replace(
        pack,
        **{
            field.name: getattr(pack, field.name).to(device, non_blocking=True)
            for field in dataclasses.fields(pack)
        },
    )


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def packs_ahead(reader: PackReader, orders: Iterable[PackOrder]) -> Iterator[Iterator[ReadyPack]]:
    """Packs in the order asked for, made by a background thread that ends with the context.

    An error of the thread is raised where its pack is taken.
    """
    ready: queue.Queue[ReadyPack | _Failure | None] = queue.Queue(maxsize=_WAITING)
    stop = threading.Event()

    def put(item: ReadyPack | _Failure | None) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return

    def work() -> None:
        try:
            for order in orders:
                if stop.is_set():
                    return
                put(reader.make(order))
            put(None)
        except BaseException as error:
            put(_Failure(error))

    def take() -> Iterator[ReadyPack]:
        while (item := ready.get()) is not None:
            if isinstance(item, _Failure):
                raise item.error
            yield item

    thread = threading.Thread(target=work, name="packs-ahead", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        stop.set()
        thread.join()
