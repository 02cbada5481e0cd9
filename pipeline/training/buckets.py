"""The memory of one bucket of weights on one rank.

Weights and gradients are whole on every rank; float32 masters and moments are this rank's part of
them, so that all ranks together hold each once.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pipeline.draft.weights import Parts, joined_shape
from pipeline.training.exchange import own_part, start_gather
from pipeline.training.ranks import Ranks

_ALIGNED = 64
"""Elements that a rank's part is a multiple of: copies and sums stay aligned in every dtype."""


class Bucket:
    """Flat tensors [P], P the bucket's size with padding, and [n], this rank's part of it.

    weight [P], of the compute dtype; gradient float32 [P]; master, first, second float32 [n]. In
    float32 the master is the own part of weight itself. Padding is zero and stays so.
    """

    def __init__(self, parts: Parts, *, dtype: torch.dtype, ranks: Ranks) -> None:
        self._parts, self._ranks = parts, ranks
        self.shape = joined_shape(parts)
        self.names = tuple(name for name, _ in parts)
        unit = _ALIGNED * ranks.world
        padded = -(-math.prod(self.shape) // unit) * unit
        self.weight = torch.zeros(padded, dtype=dtype, device=ranks.device)
        self.gradient = torch.zeros(padded, dtype=torch.float32, device=ranks.device)
        self.own_weight = own_part(self.weight, ranks)
        self.own_gradient = own_part(self.gradient, ranks)
        fresh = torch.zeros_like(self.own_gradient)
        self.master = self.own_weight if dtype == torch.float32 else fresh
        self.first, self.second = torch.zeros_like(fresh), torch.zeros_like(fresh)

    def joined(self, flat: Tensor) -> Tensor:
        """A flat [P] tensor without its padding, in the bucket's shape: a view."""
        return flat[: math.prod(self.shape)].view(self.shape)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat [P] tensor's pieces by parameter name, in the parameters' shapes: views."""
        return {name: flat[rows].view(shape) for name, shape, rows in self._places()}

    def set_weights(self, named: Mapping[str, Tensor]) -> None:
        """Takes weights and masters from whole float32 tensors by parameter name."""
        for name, piece in self.named(self.weight).items():
            piece.copy_(named[name])
        if self.master is not self.own_weight:
            self.set_part(self.master, named)

    def set_part(self, part: Tensor, named: Mapping[str, Tensor]) -> None:
        """Fills a tensor [n] of this rank with its part of whole tensors by parameter name."""
        low = self._ranks.rank * part.shape[0]
        for name, _, rows in self._places():
            first, last = max(rows.start, low), min(rows.stop, low + part.shape[0])
            if first < last:
                piece = named[name].reshape(-1)[first - rows.start : last - rows.start]
                part[first - low : last - low].copy_(piece)

    def whole(self, part: Tensor) -> dict[str, Tensor]:
        """Whole tensors by parameter name out of all ranks' parts [n]; called by all ranks.

        Alone, they are views. Else they lie in the gradient's memory, which is free between steps,
        and hold until the next call.
        """
        if self._ranks.world == 1:
            return self.named(part)
        self.own_gradient.copy_(part)
        start_gather(self.gradient, ranks=self._ranks).wait()
        return self.named(self.gradient)

    def _places(self) -> Iterator[tuple[str, tuple[int, ...], slice]]:
        first = 0
        for name, shape in self._parts:
            last = first + math.prod(shape)
            yield name, shape, slice(first, last)
            first = last
