"""The draft head's loss by row, from logits of drafter and teacher, with its slope in place."""

from typing import Literal

import torch
from torch import Tensor

LossKind = Literal["kl", "tv"]

_BLOCK_ELEMENTS = 1 << 19
"""Elements a block of asked rows of the plain form: 64 rows of a draft vocabulary of 8192."""


def judge(
    logits: Tensor,
    teacher: Tensor,
    rows: Tensor,
    label: Tensor,
    weight: Tensor,
    step: Tensor,
    *,
    sums: Tensor,
    kind: LossKind,
    learns: bool,
) -> None:
    """Adds loss, hits and overlap of asked rows to `sums`; makes logits their slope if `learns`.

    logits [a, D], the drafter's, and teacher [s, D]: q and p are their softmaxes, p taken at
    rows int64 [a]. label int64 [a], -1 outside the draft vocabulary. weight [a], wide: factor of a
    row's slope. step int64 [a]. sums float64 [3, K], by step: unweighted loss, argmax of q is the
    label, sum of min(p, q).

    kl: soft cross-entropy -sum p log q, which is KL(p || q) plus the teacher's own entropy, a
    constant; slope q - p. tv: 1 - sum min(p, q); slope q * (g - sum q g) with g = sign(q - p) / 2.
    learns: logits become slope * weight. All is computed wide.
    """
    if logits.is_cuda:
        from pipeline.kernels.cuda import judge as fused

        fused.judge(logits, teacher, rows, label, weight, step, sums=sums, kind=kind, learns=learns)
        return
    wide = torch.promote_types(logits.dtype, torch.float32)
    taught = teacher.softmax(-1, dtype=wide)  # once a teacher row, though up to K rows ask for it
    facts = torch.empty(3, logits.shape[0], dtype=torch.float64)
    size = max(1, _BLOCK_ELEMENTS // logits.shape[-1])
    for low in range(0, logits.shape[0], size):
        block = slice(low, low + size)
        _judge_block(
            logits[block],
            _taken(taught, rows[block]),
            label[block],
            weight[block],
            facts=facts[:, block],
            kind=kind,
            learns=learns,
        )
    sums.index_add_(1, step, facts)


def _judge_block(
    logits: Tensor,
    p: Tensor,
    label: Tensor,
    weight: Tensor,
    *,
    facts: Tensor,
    kind: LossKind,
    learns: bool,
) -> None:
    """Facts [3, b] of rows with logits [b, D] and teacher's p [b, D]; their slope if `learns`."""
    held = logits.to(p.dtype)
    top, best = held.max(-1)
    q = held.softmax(-1)
    # The log-sum-exp from the largest entry: exact enough (q there is at least 1 / D), and one
    # pass over the block less than torch.logsumexp.
    lse = top - q.gather(-1, best[:, None]).squeeze(-1).log()
    cross = (p[:, None] @ held[..., None]).flatten()  # sum of p * logit, without a product tensor
    gap = q - p if kind == "tv" else q.sub_(p)  # kl needs q no more
    apart = torch.linalg.vector_norm(gap, ord=1, dim=-1) / 2
    facts[0] = lse - cross if kind == "kl" else apart
    facts[1] = best == label
    facts[2] = 1 - apart
    if not learns:
        return
    if kind == "tv":
        pull = gap.sign_().div_(2)
        pull.sub_((q[:, None] @ pull[..., None]).squeeze(-1)).mul_(q)
    torch.mul(gap, weight[:, None], out=logits)


def _taken(taught: Tensor, rows: Tensor) -> Tensor:
    """taught[rows], without a copy where the rows follow one another."""
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + rows.shape[0])):
        return taught[first : first + rows.shape[0]]
    return taught.index_select(0, rows)
