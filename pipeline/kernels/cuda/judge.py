# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The loss by row on a GPU: two passes over a row of logits, the second mostly from cache.

A row of the draft vocabulary does not fit in a program's registers. The first pass makes its
log-sum-exp and its best entry, the second, against the teacher's row, loss, overlap and slope.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.cuda.blocks import Device, Launch, Shape, Tuning, pointer, power_of_two


@triton.jit
def _online(value, top, total):
    """A lane's running largest value and sum of exponentials, one exponential an element."""
    rise = value - top
    small = tl.exp(-tl.abs(rise))
    total = tl.where(rise > 0, total * small + 1.0, total + small)
    return tl.maximum(top, value), total


@triton.jit
def _teach(teacher, facts, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The log-sum-exp of one teacher row a program: once, though up to K rows ask for it."""
    row = tl.program_id(0).to(tl.int64)
    place = teacher + row * stride
    # Finite starts: minus infinity from itself is no number.
    top = tl.full([BLOCK], -3.0e38, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(place + column, mask=column < WIDTH, other=-float("inf")).to(tl.float32)
        top, total = _online(value, top, total)
    largest = tl.max(top, 0)
    tl.store(facts + row, largest + tl.log(tl.sum(total * tl.exp(top - largest), 0)))


# Slices of a pack begin anywhere: were their alignment looked at, packs would compile anew.
@triton.jit(
    do_not_specialize=["asked"],
    do_not_specialize_on_alignment=["taught", "rows", "label", "weight", "facts"],
)
def _judge(
    logits,
    teacher,
    taught,
    rows,
    label,
    weight,
    facts,
    logits_stride,
    teacher_stride,
    asked,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VARIATION: tl.constexpr,
    LEARNS: tl.constexpr,
):
    """One asked row a program: facts [3, asked], and the slope over its logits."""
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * logits_stride
    top = tl.full([BLOCK], -3.0e38, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    at = tl.full([BLOCK], WIDTH, dtype=tl.int32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(place + column, mask=column < WIDTH, other=-float("inf")).to(tl.float32)
        at = tl.where(z > top, column, at)
        top, total = _online(z, top, total)
    largest = tl.max(top, 0)
    best = tl.min(tl.where(top == largest, at, WIDTH), 0)
    total_q = tl.sum(total * tl.exp(top - largest), 0)
    lse = largest + tl.log(total_q)

    judge = tl.load(rows + row)
    lse_p = tl.load(taught + judge)
    beside = teacher + judge * teacher_stride
    factor = tl.load(weight + row)
    cross = tl.zeros([BLOCK], dtype=tl.float32)
    apart = tl.zeros([BLOCK], dtype=tl.float32)
    pull = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        z = tl.load(place + column, mask=inside, other=-3.0e38).to(tl.float32)
        t = tl.load(beside + column, mask=inside, other=-float("inf")).to(tl.float32)
        q, p = tl.exp(z - lse), tl.exp(t - lse_p)
        gap = q - p
        apart += tl.abs(gap)
        if VARIATION:
            pull += q * tl.where(gap > 0, 0.5, tl.where(gap < 0, -0.5, 0.0))
        else:
            cross += p * (lse - z)
            if LEARNS:
                slope = (gap * factor).to(logits.dtype.element_ty)
                tl.store(place + column, slope, mask=inside)
    half = tl.sum(apart, 0) * 0.5
    if VARIATION:
        tl.store(facts + row, half)
    else:
        tl.store(facts + row, tl.sum(cross, 0))
    hit = best == tl.load(label + row)
    tl.store(facts + asked + row, hit.to(tl.float32))
    tl.store(facts + 2 * asked.to(tl.int64) + row, 1.0 - half)
    if VARIATION and LEARNS:
        mean = tl.sum(pull, 0)
        for first in range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < WIDTH
            z = tl.load(place + column, mask=inside, other=-3.0e38).to(tl.float32)
            t = tl.load(beside + column, mask=inside, other=-float("inf")).to(tl.float32)
            q, p = tl.exp(z - lse), tl.exp(t - lse_p)
            sign = tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0))
            slope = (q * (sign - mean) * factor).to(logits.dtype.element_ty)
            tl.store(place + column, slope, mask=inside)


@triton.jit(do_not_specialize=["asked", "steps"], do_not_specialize_on_alignment=["facts", "step"])
def _sum_steps(facts, step, sums, asked, steps, BLOCK: tl.constexpr):
    """Adds one fact of one step's rows to sums [3, steps], in a fixed order and float64."""
    k = tl.program_id(0)
    fact = tl.program_id(1).to(tl.int64)
    gathered = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(0, asked, BLOCK):
        row = first + tl.arange(0, BLOCK)
        of = tl.load(step + row, mask=row < asked, other=-1)
        value = tl.load(facts + fact * asked + row, mask=of == k, other=0.0)
        gathered += value.to(tl.float64)
    goal = sums + fact * steps + k
    tl.store(goal, tl.load(goal) + tl.sum(gathered, 0))


@functools.cache
def _teach_tuning(width: int) -> Tuning:
    block = min(4096, power_of_two(width))
    return Tuning({"WIDTH": width, "BLOCK": block}, num_warps=max(1, block // 512))


@functools.cache
def _judge_tuning(width: int, variation: bool, learns: bool) -> Tuning:
    """Sixteen warps a row: few rows are under way, so that the second pass finds its row near."""
    block = min(4096, power_of_two(width))
    return Tuning(
        {"WIDTH": width, "BLOCK": block, "VARIATION": variation, "LEARNS": learns},
        num_warps=max(1, block // 512),
    )


_SUM_TUNING = Tuning({"BLOCK": 1024}, num_warps=4)


def judge(
    logits: Tensor,
    teacher: Tensor,
    rows: Tensor,
    label: Tensor,
    weight: Tensor,
    step: Tensor,
    *,
    sums: Tensor,
    kind: str,
    learns: bool,
) -> None:
    """As `kernels.judge.judge`; allocates [s] and [3, a] float32."""
    asked, width = logits.shape
    if not asked:
        return
    taught = torch.empty(teacher.shape[0], dtype=torch.float32, device=logits.device)
    facts = torch.empty(3, asked, dtype=torch.float32, device=logits.device)
    _teach[(teacher.shape[0],)](teacher, taught, teacher.stride(0), **_teach_tuning(width).options)
    _judge[(asked,)](
        logits, teacher, taught, rows, label, weight, facts,
        logits.stride(0), teacher.stride(0), asked,
        **_judge_tuning(width, kind == "tv", learns).options,
    )  # fmt: skip
    steps = sums.shape[1]
    _sum_steps[(steps, 3)](facts, step, sums, asked, steps, **_SUM_TUNING.options)


def launches(shape: Shape, dtype: torch.dtype, device: Device) -> list[Launch]:
    """The kernels of the loss, for both kinds of it."""
    del device  # the same everywhere: no shared memory but for sums over a row
    row, width = pointer(dtype), shape.vocabulary
    judged = {
        "logits": row,
        "teacher": row,
        "taught": "*fp32",
        "rows": "*i64",
        "label": "*i64",
        "weight": "*fp32",
        "facts": "*fp32",
        "logits_stride": "i32",
        "teacher_stride": "i32",
        "asked": "i32",
    }
    return [
        Launch(
            "teach",
            _teach,
            {"teacher": row, "facts": "*fp32", "stride": "i32"},
            _teach_tuning(width),
            ("stride",),
        ),
        *(
            Launch(
                f"judge_{kind}{'_learns' if learns else ''}",
                _judge,
                judged,
                _judge_tuning(width, kind == "tv", learns),
                ("logits_stride", "teacher_stride"),
            )
            for kind in ("kl", "tv")
            for learns in (False, True)
        ),
        Launch(
            "sum_steps",
            _sum_steps,
            {"facts": "*fp32", "step": "*i64", "sums": "*fp64", "asked": "i32", "steps": "i32"},
            _SUM_TUNING,
        ),
    ]
