# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The AdamW update on a GPU: one pass, 30 bytes a parameter of a bfloat16 model."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.adamw import corrections
from pipeline.kernels.cuda.blocks import Device, Launch, Shape, Tuning, pointer


@triton.jit
def _adamw(
    weight,
    master,
    gradient,
    first,
    second,
    factor,
    n,
    fresh_first,
    keep_second,
    fresh_second,
    keep,
    pace,
    root,
    eps,
    BLOCK: tl.constexpr,
):
    """BLOCK parameters a program; where factor is not finite none is loaded or stored."""
    by = tl.load(factor)
    if tl.abs(by) < float("inf"):
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < n
        given = tl.load(gradient + place, mask=inside, other=0.0) * by
        moment = tl.load(first + place, mask=inside, other=0.0)
        spread = tl.load(second + place, mask=inside, other=0.0)
        held = tl.load(master + place, mask=inside, other=0.0)
        moment += (given - moment) * fresh_first
        spread = spread * keep_second + given * given * fresh_second
        held = held * keep - pace * (moment / (tl.sqrt(spread) / root + eps))
        tl.store(first + place, moment, mask=inside)
        tl.store(second + place, spread, mask=inside)
        tl.store(master + place, held, mask=inside)
        if weight is not None:
            tl.store(weight + place, held.to(weight.dtype.element_ty), mask=inside)


_TUNING = Tuning({"BLOCK": 1024}, num_warps=4)


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
    """As `kernels.adamw.adamw`."""
    n = master.shape[0]
    if not n:
        return
    # All that changes from step to step is a float argument: a constant would compile anew.
    pace, root = corrections(rate=rate, betas=betas, step=step)
    _adamw[(-(-n // _TUNING.constexprs["BLOCK"]),)](
        None if weight.data_ptr() == master.data_ptr() else weight,
        master, gradient, first, second, factor, n,
        1 - betas[0], betas[1], 1 - betas[1], 1 - rate * weight_decay, pace, root, eps,
        **_TUNING.options,
    )  # fmt: skip


def launches(shape: Shape, dtype: torch.dtype, device: Device) -> list[Launch]:
    """The update with and without a copy of another dtype; a bucket's size is no constant."""
    del shape, device
    master = dict.fromkeys(("master", "gradient", "first", "second", "factor"), "*fp32")
    floats = ("fresh_first", "keep_second", "fresh_second", "keep", "pace", "root", "eps")
    common = {**master, "n": "i32", **dict.fromkeys(floats, "fp32")}
    return [
        Launch("adamw", _adamw, {"weight": pointer(dtype), **common}, _TUNING, ("n",)),
        Launch("adamw_float32", _adamw, common, _TUNING, ("n",)),
    ]
