"""Numbers that ranks send, and what must come back: exact whole numbers in every dtype.

Element i of rank r in round n is ((i mod 8191)(2r + 3) + 257 r + 31 n) mod m. m is so small that
no sum over the ranks leaves the range in which the dtype holds every whole number: any order of
additions gives the same bits. A share of another rank, place or round does not go unnoticed.
"""

import torch
from torch import Tensor

from pipeline.nccl.cases import Case

_WHOLE = {"float32": 1 << 24, "bfloat16": 1 << 8}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PERIOD, _LARGEST = 8191, 65521


class Pattern:
    """What all ranks of one case send and get; tensors are [batch, n], n a buffer's elements."""

    def __init__(self, case: Case, *, rank: int, world: int, device: torch.device) -> None:
        self._case, self._rank, self._world = case, rank, world
        self._dtype = _DTYPES[case.dtype]
        n = case.elements(world)
        self._part = n // world
        self._modulus = min(_WHOLE[case.dtype] // world, _LARGEST)
        places = torch.arange(case.batch * n, dtype=torch.int32, device=device)
        self._places = places.remainder_(_PERIOD).view(case.batch, n)

    def sent(self, round_: int) -> Tensor:
        """This rank's buffers [batch, n]; of all_gather, its own part [batch, n / world]."""
        whole = self._values(self._rank, self._places, round_)
        if self._case.operation == "all_gather":
            whole = whole[:, self._own(self._rank)].contiguous()
        return whole.to(self._dtype)

    def wanted(self, round_: int) -> Tensor:
        """What this rank has to find after the operation, exactly."""
        own = self._own(self._rank)
        ranks = range(self._world)
        if self._case.operation == "all_gather":
            parts = [self._values(r, self._places[:, self._own(r)], round_) for r in ranks]
            return torch.cat(parts, dim=1).to(self._dtype)
        if self._case.operation == "all_to_all":
            parts = [self._values(r, self._places[:, own], round_) for r in ranks]
            return torch.cat(parts, dim=1).to(self._dtype)
        places = self._places[:, own] if self._case.operation == "reduce_scatter" else self._places
        total = torch.zeros_like(places)
        for r in ranks:
            total += self._values(r, places, round_)
        return total.to(self._dtype)

    def _own(self, rank: int) -> slice:
        return slice(rank * self._part, (rank + 1) * self._part)

    def _values(self, rank: int, places: Tensor, round_: int) -> Tensor:
        values = places * (2 * rank + 3)
        values += 257 * rank + 31 * round_
        return values.remainder_(self._modulus)


def first_wrong(found: Tensor, wanted: Tensor) -> str | None:
    """Says where two tensors [batch, n] differ first and how often; None when they are equal."""
    if torch.equal(found, wanted):
        return None
    wrong = found != wanted  # true for NaN
    place = int(wrong.flatten().nonzero()[0, 0])
    return (
        f"element {place % found.shape[1]} of message {place // found.shape[1]} is "
        f"{float(found.flatten()[place]):g}, wanted {float(wanted.flatten()[place]):g}; "
        f"{int(wrong.sum())} of {wrong.numel()} are wrong"
    )
