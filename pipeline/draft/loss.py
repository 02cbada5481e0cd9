"""Draft head and loss in row chunks: no tensor of rows x draft vocabulary outlives its chunk.

Gradients of the head and of its input are made in forward, while a chunk's logits are at hand, and
scaled in backward. Asked rows are visited by *teacher* row: row t at step k is judged by the
target's state at row t + 1 + k, so the teacher's product with its head is made once for up to K
of them.
"""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

LossKind = Literal["kl", "tv"]

TEACHER_ROWS = {"cpu": 384, "cuda": 2048}
"""Teacher rows a chunk. CPU: 384 x 8192 float32 logits, twice, stay in a 32 MiB L3 cache."""


@dataclasses.dataclass(frozen=True, eq=False)
class LossInputs:
    """What the head is judged on; A asked rows in step order, S teacher rows.

    teacher [S, Ht]: final states, in row order. teacher_head [D, Ht]. chunks: for each chunk
    of teacher rows [low, high): per step, the asked rows [first, last) judged by them.
    judge int64 [A]: teacher row of each asked row, rising within a step.
    label int64 [A]: draft id of the label, -1 outside the draft vocabulary.
    weights: decay ** k, one a step.
    """

    teacher: Tensor
    teacher_head: Tensor
    chunks: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
    judge: Tensor
    label: Tensor
    weights: tuple[float, ...]
    kind: LossKind


def plan_chunks(
    judges: list[Tensor], teachers: int, *, rows: int
) -> tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]:
    """Chunks of at most `rows` teacher rows with the asked rows of each step.

    judges: per step, int64 [A_k], rising teacher rows. teachers: S.
    """
    edges = torch.arange(0, teachers + rows, rows).clamp(max=teachers)
    offset, per_step = 0, []
    for judge in judges:
        cut = torch.searchsorted(judge.cpu(), edges) + offset
        per_step.append(cut.tolist())
        offset += judge.shape[0]
    bounds = edges.tolist()
    return tuple(
        (bounds[c], bounds[c + 1], tuple((cut[c], cut[c + 1]) for cut in per_step))
        for c in range(len(bounds) - 1)
        if bounds[c] < bounds[c + 1]
    )


def head_loss(hidden: Tensor, head: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Weighted loss sum (scalar, float32 or wider, with graph) and sums [3, K] float64 by step.

    hidden [A, H]: normed states of the asked rows, in step order. head [D, H].
    Sums: unweighted loss, correct, overlap. kl: soft cross-entropy -sum p log q, which is
    KL(p || q) plus the teacher's own entropy, a constant. tv: 1 - sum min(p, q).
    """
    learns = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    loss, sums = _HeadLoss.apply(hidden, head, inputs, learns)  # type: ignore[no-untyped-call]
    return loss, sums


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, inputs: LossInputs, learns: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = torch.zeros(3, len(inputs.weights), dtype=torch.float64, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if learns else None
        d_head = torch.zeros_like(head, dtype=wide) if learns else None
        for low, high, parts in inputs.chunks:
            p = functional.linear(inputs.teacher[low:high], inputs.teacher_head).softmax(
                -1, dtype=wide
            )
            for k, (first, last) in enumerate(parts):
                if first == last:
                    continue
                rows = slice(first, last)
                judge = inputs.judge[rows] - low
                whole = last - first == high - low
                logits = functional.linear(hidden[rows], head)
                slope, facts = _judge(
                    logits, p if whole else p[judge], inputs.label[rows], kind=inputs.kind
                )
                sums[:, k] += facts
                if d_hidden is None or d_head is None:
                    continue
                slope = slope.to(head.dtype)
                torch.mm(slope, head, out=d_hidden[rows])
                d_hidden[rows] *= inputs.weights[k]
                _accumulate(d_head, slope, hidden[rows] * inputs.weights[k])
        loss = sums[0] @ torch.tensor(inputs.weights, dtype=sums.dtype, device=sums.device)
        if d_hidden is not None and d_head is not None:
            ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(sums)
        ctx.head_dtype = head.dtype
        return loss.to(wide), sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        given = gradients[0]
        return d_hidden * given.to(d_hidden.dtype), (d_head * given).to(ctx.head_dtype), None, None


def _judge(logits: Tensor, p: Tensor, label: Tensor, *, kind: LossKind) -> tuple[Tensor, Tensor]:
    """Slope of the unweighted loss by logit [r, D], and [loss, correct, overlap] summed, float64.

    logits [r, D]; p [r, D]: teacher's probabilities, wide dtype; label int64 [r].
    """
    logits = logits.to(p.dtype)
    top, best = logits.max(-1)
    q = logits.softmax(-1)
    # The log-sum-exp from the largest entry: exact enough (q there is at least 1 / D), and one
    # pass over the chunk less than torch.logsumexp.
    lse = top - q.gather(-1, best[:, None]).squeeze(-1).log()
    cross = (p[:, None] @ logits[..., None]).flatten()  # sum of p * logit, without a product tensor
    gap = q - p if kind == "tv" else q.sub_(p)  # kl needs q no more: no third chunk is made
    apart = torch.linalg.vector_norm(gap, ord=1, dim=-1) / 2
    if kind == "kl":
        loss, slope = lse - cross, gap
    else:
        loss, pull = apart, gap.sign_().div_(2)
        slope = q * (pull - (q[:, None] @ pull[..., None]).squeeze(-1))
    facts = (loss, best == label, 1 - apart)
    return slope, torch.stack([fact.sum(dtype=torch.float64) for fact in facts])


def _accumulate(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """Adds slope^T hidden to total [D, H], the sum in total's dtype."""
    if total.dtype == slope.dtype:
        total.addmm_(slope.T, hidden)
    else:
        total += slope.T @ hidden
