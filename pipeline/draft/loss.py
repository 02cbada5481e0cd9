"""Draft head and loss in chunks of rows: no tensor of rows x draft vocabulary outlives its chunk.

The head's gradient and that of its input are made while a chunk's logits are at hand. Asked rows
are visited in order of their *teacher* row: row t at step k is judged by the target's state at row
t + 1 + k, so the teacher's product with its head is made once for up to K of them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.draft.chain import ChainPlan
from pipeline.draft.products import add_product
from pipeline.draft.weights import FINAL_NORM, Weights
from pipeline.kernels.judge import LossKind, judge
from pipeline.kernels.rows import rms_norm, rms_norm_backward

ASKED_ROWS = {"cpu": 512, "cuda": 8192}
"""Asked rows a chunk. CPU: 512 x 8192 float32 logits stay in a 32 MiB L3 cache. CUDA: 512 MiB of
logits for a draft vocabulary of 32,000, and products large enough to fill the device."""


def chunks(plan: ChainPlan, *, most: int) -> Iterator[tuple[slice, slice]]:
    """Slices of teachers and of the asked rows they judge, each of at most about `most` rows."""
    teachers = len(plan.judged) - 1
    size = max(1, most // max(1, len(plan.steps)))  # a teacher judges at most one row a step
    for low in range(0, teachers, size):
        high = min(low + size, teachers)
        yield slice(low, high), slice(int(plan.judged[low]), int(plan.judged[high]))


def head_loss(
    weights: Weights,
    output: Tensor,
    plan: ChainPlan,
    *,
    eps: float,
    final: Tensor,
    teacher_head: Tensor,
    labels: Tensor,
    kind: LossKind,
    gradients: Weights | None,
    scale: float,
    fresh: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sums of the loss, and its slopes by `output` [M, H] when gradients are wanted.

    output: the layer's, of the whole stack. final [S, Ht], teacher_head [D, Ht]. labels int64 [A]:
    draft id of each asked pair's label, -1 outside the draft vocabulary.
    Sums float64 [5, K], by step: count, correct, overlap, outside, unweighted loss. gradients:
    those of the head and of the final norm are added, times `scale`; the head's is written when
    `fresh`.
    """
    device, dtype = output.device, output.dtype
    wide = torch.promote_types(dtype, torch.float32)
    K = len(plan.counts)
    facts = torch.zeros(3, K, dtype=torch.float64, device=device)
    slopes = None if gradients is None else torch.zeros_like(output)
    factor = (plan.decay ** plan.asked_step.to(torch.float64) * scale).to(wide)
    norm = weights.norms[FINAL_NORM]
    most = ASKED_ROWS["cpu" if device.type == "cpu" else "cuda"]
    for teachers, asked in chunks(plan, most=most):
        places = plan.asked[asked]
        normed = torch.empty(len(places), output.shape[1], dtype=dtype, device=device)
        scales = torch.empty(len(places), dtype=wide, device=device)
        rms_norm(output, norm, eps=eps, index=places, out=normed, scale=scales)
        logits = normed @ weights.head.T
        judge(
            logits,
            final[teachers] @ teacher_head.T,
            plan.judge[asked] - teachers.start,
            labels[asked],
            factor[asked],
            plan.asked_step[asked],
            sums=facts,
            kind=kind,
            learns=gradients is not None,
        )
        if gradients is None or slopes is None:
            continue
        add_product(gradients.head, logits.T, normed, fresh=fresh and teachers.start == 0)
        rms_norm_backward(
            logits @ weights.head, output, norm, scales,
            index=places, at=places,
            out=slopes, weight_gradient=gradients.norms[FINAL_NORM],
        )  # fmt: skip
    outside = torch.zeros(K, dtype=torch.float64, device=device)
    outside.index_add_(0, plan.asked_step, (labels < 0).to(torch.float64))
    count = torch.ones_like(factor, dtype=torch.float64)
    counts = torch.zeros_like(outside).index_add_(0, plan.asked_step, count)
    loss, correct, overlap = facts
    return torch.stack([counts, correct, overlap, outside, loss]), slopes
