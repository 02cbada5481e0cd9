"""How well rows of states go with token ids and with one another: pure functions.

All are tests by permutation: what belongs together, row by row, is compared with what does not.
They give a mean percentile: 0.5 by chance (give or take 0.29 / sqrt(rows)), 1 at best. What was
measured, and where the bounds lie, is in docs/adopt.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLOCKS, BLOCK_ROWS = 4, 16
"""Rows that are looked at: so many blocks of neighbours, as the neighbours are the hardest."""
_PART_ROWS = 8  # at least, of a part that is judged by itself


@dataclass(frozen=True)
class Link:
    """How rows of one tensor find their own rows in another.

    percentile: mean share of other rows that are less alike; worst: the same of the worst quarter
    of the rows, in order; hits: share of rows for which no other is as alike; cosine: mean of the
    standardised rows' cosines.
    """

    percentile: float
    worst: float
    hits: float
    cosine: float


def blocks_of(first: int, stop: int) -> list[tuple[int, int]]:
    """(first, count) of the rows of [first, stop) that are looked at; all where they are few."""
    if stop - first <= BLOCKS * BLOCK_ROWS:
        return [(first, stop - first)] if stop > first else []
    step = (stop - BLOCK_ROWS - first) / (BLOCKS - 1)
    return [(first + round(number * step), BLOCK_ROWS) for number in range(BLOCKS)]


def rows_of(blocks: list[tuple[int, int]]) -> Tensor:
    """The row numbers of blocks, int64."""
    return torch.cat([torch.arange(first, first + count) for first, count in blocks])


def next_token_percentiles(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the other rows' next tokens that each row finds less likely than its own, [m].

    logits [m, m]: of row r for the label of row c; labels [m]. One row's normaliser is the same for
    all labels, so it is not needed.
    """
    other = labels[:, None] != labels[None, :]
    less = (logits < logits.diagonal()[:, None]) & other
    return less.sum(1) / other.sum(1).clamp(min=1)


def link(a: Tensor, b: Tensor) -> Link:
    """Compares rows [m, H] of two states of (presumably) the same tokens."""
    alike = _standardised(a) @ _standardised(b).T
    own = alike.diagonal()
    below = (alike < own[:, None]).sum(1) / max(1, len(own) - 1)
    parts = below.tensor_split(max(1, min(4, len(own) // _PART_ROWS)))
    hits = (alike >= own[:, None]).sum(1) == 1
    return Link(
        percentile=float(below.mean()),
        worst=min(float(part.mean()) for part in parts),
        hits=float(hits.float().mean()),
        cosine=float(own.mean()),
    )


def _standardised(rows: Tensor) -> Tensor:
    """Rows less their mean, each channel by its deviation (a few channels are huge), length 1."""
    rows = rows.float()
    rows = rows - rows.mean(0)
    rows = rows / (rows.std(0) + 1e-6)
    return functional.normalize(rows, dim=1)


def _parts(rows: Tensor, size: int) -> Iterator[Tensor]:
    """Consecutive parts, so that float32 copies stay in a core's cache."""
    return (rows[start : start + size] for start in range(0, len(rows), size))


def log_probabilities(final: Tensor, labels: Tensor, head: Tensor) -> Tensor:
    """Log p of labels [m] int64 by rows [m, H] under a head [V, H], nats, float32 [m].

    The vocabulary is gone through in blocks, so that few logits exist at once.
    """
    states = final.float()
    parts = [torch.logsumexp(states @ block.float().T, 1) for block in _parts(head, 8192)]
    own = (states * head[labels].float()).sum(1)
    return own - torch.logsumexp(torch.stack(parts), 0)


def row_peaks(rows: Tensor) -> Tensor:
    """Greatest magnitude in each row, float32 [n]: 0 for a zero row, not finite for a bad one."""
    return torch.cat([part.float().abs().amax(1) for part in _parts(rows, 32)])


def rms_after_norm(final: Tensor, weight: Tensor) -> Tensor:
    """Root mean square of each row with the norm's weight taken out, float32 [n].

    It is 1 after an RMS norm of that weight, and only then. weight float32 [H], no zero in it.
    """
    return torch.cat(
        [(part.float() / weight).square().mean(1).sqrt() for part in _parts(final, 32)]
    )
