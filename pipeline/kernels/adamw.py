"""One AdamW update of flat tensors."""

import math

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 18
"""Elements a block of the plain form: its five tensors stay in a core's cache between passes."""


def adamw(
    weight: Tensor,
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    factor: Tensor,
) -> None:
    """Updates master, its moments `first` and `second`, and weight, its copy to compute with.

    All flat [n], contiguous; float32 (float64 in tests) but weight, whose dtype is the model's; it
    may be master itself. rate: learning rate. step: of this update, from 1, for the bias
    correction. factor: scalar tensor on the device that multiplies the gradient (clipping); where
    it is not finite, nothing changes at all. The arithmetic is torch.optim.AdamW's.
    """
    if master.is_cuda:
        from pipeline.kernels.cuda import adamw as fused

        fused.adamw(
            weight,
            master,
            gradient,
            first,
            second,
            rate=rate,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            factor=factor,
        )
        return
    if not bool(torch.isfinite(factor)):
        return
    pace, root = corrections(rate=rate, betas=betas, step=step)
    copied = weight.data_ptr() != master.data_ptr()
    for low in range(0, master.shape[0], _BLOCK_ELEMENTS):
        block = slice(low, low + _BLOCK_ELEMENTS)
        given, moment, spread = gradient[block] * factor, first[block], second[block]
        moment.lerp_(given, 1 - betas[0])
        spread.mul_(betas[1]).addcmul_(given, given, value=1 - betas[1])
        torch.sqrt(spread, out=given).div_(root).add_(eps)
        updated = master[block]
        updated.mul_(1 - rate * weight_decay).addcdiv_(moment, given, value=-pace)
        if copied:
            weight[block] = updated


def corrections(*, rate: float, betas: tuple[float, float], step: int) -> tuple[float, float]:
    """The update's pace (rate over the first moment's correction) and the root of the second's."""
    return rate / (1 - betas[0] ** step), math.sqrt(1 - betas[1] ** step)
