"""The plan: which samples share a pack, which packs share an optimizer step, in which order.

Array work only, so that 300,000 samples are planned in milliseconds; the same plan is made on
every rank from the same numbers, and nothing about it is ever sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.training.errors import NothingToTrain

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Packing:
    """Samples laid into packs, and packs into optimizer steps.

    order [n] int64: sample indices in the order of this epoch. borders [P + 1] int64: pack p holds
    order[borders[p]:borders[p + 1]]. packs_per_step: packs of one step, the last step may hold
    fewer.
    """

    order: Indices
    borders: Indices
    packs_per_step: int

    @property
    def packs(self) -> int:
        """Number of packs."""
        return len(self.borders) - 1

    @property
    def steps(self) -> int:
        """Number of optimizer steps: packs / packs_per_step, rounded up."""
        return -(-self.packs // self.packs_per_step)

    def samples(self, pack: int) -> Indices:
        """Sample indices of one pack, in its row order."""
        return self.order[self.borders[pack] : self.borders[pack + 1]]

    def step_packs(self, step: int, *, rank: int = 0, world: int = 1) -> list[Indices]:
        """Packs of step 0..steps-1 that a rank works on, dealt in turn; may be none."""
        first = step * self.packs_per_step
        last = min(first + self.packs_per_step, self.packs)
        return [self.samples(pack) for pack in range(first + rank, last, world)]


def pack_in_order(
    order: Indices, lengths: Indices, *, tokens_per_pack: int, packs_per_step: int
) -> Packing:
    """Fills packs in the given order, each up to tokens_per_pack tokens.

    order [n] int64 indices into lengths [N] int64 (tokens). No sample is split; one longer than a
    pack gets its own.
    """
    ends = np.concatenate([[0], np.cumsum(lengths[order])])  # [n + 1] tokens before each sample
    borders = [0]
    while borders[-1] < len(order):
        start = borders[-1]
        fits = int(np.searchsorted(ends, ends[start] + tokens_per_pack, side="right")) - 1
        borders.append(max(fits, start + 1))
    return Packing(order, np.array(borders, dtype=np.int64), packs_per_step)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """All epochs of a run.

    samples [n] int64: indices of the training samples; lengths [N] int64: tokens of every sample.
    Each epoch has an order of its own, drawn from (seed, epoch). NothingToTrain without samples.
    """

    samples: Indices
    lengths: Indices
    tokens_per_pack: int
    packs_per_step: int
    epochs: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.samples) == 0:
            raise NothingToTrain(
                "the dataset holds no training sample with a supervised token",
                wanted="at least one",
                next_step="look at the counts of `make prepare`: template, lengths, held-out share",
            )

    def epoch(self, epoch: int) -> Packing:
        """Packing of epoch 0..epochs-1."""
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        return pack_in_order(
            draw.permutation(self.samples),
            self.lengths,
            tokens_per_pack=self.tokens_per_pack,
            packs_per_step=self.packs_per_step,
        )

    def steps_per_epoch(self) -> list[int]:
        """Optimizer steps of each epoch; they may differ by a few, as packs fill differently."""
        return [self.epoch(epoch).steps for epoch in range(self.epochs)]

    def from_step(self, done: int) -> Iterator[tuple[int, int, Packing]]:
        """(epoch, step within it, its packing) of every step after the first `done` of the run."""
        for epoch in range(self.epochs):
            packing = self.epoch(epoch)
            for step in range(min(done, packing.steps), packing.steps):
                yield epoch, step, packing
            done = max(0, done - packing.steps)
