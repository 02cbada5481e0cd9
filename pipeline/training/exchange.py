"""What travels between the devices of all ranks: sums of gradients, and weights.

A buffer here is flat, the same size on every rank and a multiple of their number; rank r *owns* its
r-th part. Everything is queued behind the work of the device's current stream. Each function is
called by all ranks, in one order.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.training.ranks import Ranks, lost_peers

# torch 2.13 renamed both and warns of the old names, which are all that 2.11 has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(Protocol):
    """Something under way between ranks."""

    def wait(self) -> None:
        """Lets later work of the current stream follow it; on a GPU the host does not wait."""


def own_part(buffer: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of a flat buffer, a view."""
    size = buffer.shape[0] // ranks.world
    assert size * ranks.world == buffer.shape[0]
    return buffer[ranks.rank * size : (ranks.rank + 1) * size]


def start_sum(buffer: Tensor, *, ranks: Ranks, dtype: torch.dtype) -> Pending:
    """Starts adding a float32 buffer up over ranks; own parts get the sums, the rest is undefined.

    dtype bfloat16: what travels is rounded once, and added up here in float32, by order of rank.
    """
    if dtype == torch.float32:
        with lost_peers(ranks):
            return _Started(_reduce_scatter(own_part(buffer, ranks), buffer, async_op=True), ranks)
    # A reduction by the backend would round again at each of its world - 1 additions, this rank's
    # own share included. Exchanging the parts puts as many bytes on the wire.
    sent = buffer.to(dtype)
    received = torch.empty_like(sent)
    with lost_peers(ranks):
        work = dist.all_to_all_single(received, sent, async_op=True)
    return _Parts(_Started(work, ranks, keep=sent), received, own_part(buffer, ranks), ranks)


def start_gather(buffer: Tensor, *, ranks: Ranks) -> Pending:
    """Starts filling a buffer with every rank's own part."""
    with lost_peers(ranks):
        return _Started(_all_gather(buffer, own_part(buffer, ranks), async_op=True), ranks)


def add_up(values: Tensor, *, ranks: Ranks) -> None:
    """Adds a small tensor up over ranks, in place; every rank gets the same bits."""
    if ranks.world > 1:
        with lost_peers(ranks):
            dist.all_reduce(values)


class _Started:
    """keep: memory that must live until the wait."""

    def __init__(self, work: Any, ranks: Ranks, *, keep: Tensor | None = None) -> None:
        self._work, self._ranks, self._keep = work, ranks, keep

    def wait(self) -> None:
        with lost_peers(self._ranks):
            self._work.wait()
        self._keep = None


class _Parts:
    """All ranks' shares of the own part, on their way: received [world * n], own float32 [n]."""

    def __init__(self, started: _Started, received: Tensor, own: Tensor, ranks: Ranks) -> None:
        self._started, self._received, self._own, self._ranks = started, received, own, ranks

    def wait(self) -> None:
        self._started.wait()
        for rank, share in enumerate(self._received.view(self._ranks.world, -1)):
            if rank != self._ranks.rank:  # its own share is there, not rounded
                self._own.add_(share)
