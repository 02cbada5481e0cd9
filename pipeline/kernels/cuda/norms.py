# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""RMS norms on a GPU, forward and backward: a program holds a whole row in registers.

Bound by memory, so each reads and writes every row once. Sums are in float32, whatever the dtype.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.cuda.blocks import (
    Device,
    Launch,
    Shape,
    Tuning,
    device_of,
    pointer,
    power_of_two,
)


# Slices of a pack begin anywhere: were their alignment looked at, packs would compile anew.
@triton.jit(do_not_specialize_on_alignment=["index", "scale"])
def _norm(
    x,
    residual,
    index,
    weight,
    total,
    out,
    scale,
    x_stride,
    residual_stride,
    total_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program; index is residual's when there is one, else x's."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    taken = row
    if index is not None:
        taken = tl.load(index + row)
    if residual is None:
        held = tl.load(x + taken * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    else:
        held = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        held += tl.load(residual + taken * residual_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
        kept = held.to(total.dtype.element_ty)
        tl.store(total + row * total_stride + column, kept, mask=inside)
        held = kept.to(tl.float32)
    by = 1.0 / tl.sqrt(tl.sum(held * held, 0) / WIDTH + eps)
    tl.store(scale + row, by)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = (held * by * factor).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + column, normed, mask=inside)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["index", "scale", "at"])
def _norm_backward(
    gradient,
    x,
    index,
    weight,
    scale,
    add,
    at,
    out,
    partial,
    gradient_stride,
    x_stride,
    add_stride,
    out_stride,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Every programs-th row a program, whose part of the weight's gradient stays in registers."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gathered = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        taken = row
        if index is not None:
            taken = tl.load(index + row)
        target = row
        if at is not None:
            target = tl.load(at + row)
        beside, origin = gradient + row * gradient_stride + column, x + taken * x_stride + column
        by = tl.load(scale + row)
        given = tl.load(beside, mask=inside, other=0.0).to(tl.float32)
        held = tl.load(origin, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        gathered += given * held * by
        pull = tl.sum(given * held * factor, 0) / WIDTH * by * by
        # Loaded again, from L1: kept over the sum, rows would take the second program's registers.
        # (Under another policy, or the compiler would keep the first loads after all.)
        given = tl.load(beside, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        held = tl.load(origin, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        factor = tl.load(weight + column, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
        slope = (given * factor - held * pull) * by
        if add is not None:
            slope += tl.load(add + row * add_stride + column, mask=inside, other=0.0).to(tl.float32)
        goal = out + target * out_stride + column
        if ACCUMULATE:
            slope += tl.load(goal, mask=inside, other=0.0).to(tl.float32)
        tl.store(goal, slope.to(out.dtype.element_ty), mask=inside)
    tl.store(partial + program * WIDTH + column, gathered, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_columns(
    partial, out, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Adds the column sums of partial [rows, WIDTH] to out [WIDTH], in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < WIDTH
    gathered = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & within[None, :]
        gathered += tl.load(partial + row[:, None] * WIDTH + column[None, :], inside, other=0.0)
    held = tl.load(out + column, mask=within, other=0.0)
    tl.store(out + column, held + tl.sum(gathered, 0), mask=within)


@functools.cache
def _row_tuning(width: int) -> Tuning:
    """A whole row in registers: 32 elements a thread, in four loads of 16 bytes in bf16."""
    block = power_of_two(width)
    return Tuning({"WIDTH": width, "BLOCK": block}, num_warps=min(16, max(1, block // 1024)))


@functools.cache
def _backward_tuning(width: int, accumulate: bool) -> Tuning:
    """16 elements a thread: 64 registers of a thread at a width of 7168, up to 77 at 4096."""
    block = power_of_two(width)
    return Tuning(
        {"WIDTH": width, "BLOCK": block, "ACCUMULATE": accumulate},
        num_warps=min(16, max(1, block // 512)),
    )


def _together(tuning: Tuning) -> int:
    """Programs of `rms_norm_backward` that one multiprocessor holds at once, by its registers.

    One more than fit would wait for all the others, as each has an equal share of the rows.
    """
    if tuning.constexprs["BLOCK"] > 8192:
        return 1
    return min(8, max(2, 24 // tuning.num_warps))


@functools.cache
def _columns_tuning(width: int) -> Tuning:
    return Tuning({"WIDTH": width, "ROWS": 32, "COLUMNS": 32}, num_warps=4)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: Tensor,
    scale: Tensor,
    index: Tensor | None,
) -> None:
    """As `kernels.rows.rms_norm`."""
    n, width = out.shape
    if n:
        _norm[(n,)](
            x, None, index, weight, None, out, scale,
            x.stride(0), 0, 0, out.stride(0), eps, **_row_tuning(width).options,
        )  # fmt: skip


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    total: Tensor,
    out: Tensor,
    scale: Tensor,
    index: Tensor | None,
) -> None:
    """As `kernels.rows.add_rms_norm`."""
    n, width = out.shape
    if n:
        _norm[(n,)](
            x, residual, index, weight, total, out, scale,
            x.stride(0), residual.stride(0), total.stride(0), out.stride(0), eps,
            **_row_tuning(width).options,
        )  # fmt: skip


def rms_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    out: Tensor,
    weight_gradient: Tensor,
    index: Tensor | None,
    add: Tensor | None,
    at: Tensor | None,
    accumulate: bool,
) -> None:
    """As `kernels.rows.rms_norm_backward`; allocates [programs, H] float32."""
    n, width = gradient.shape
    if not n:
        return
    tuning = _backward_tuning(width, accumulate)
    programs = min(n, _together(tuning) * device_of(x.device).multiprocessors)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        gradient, x, index, weight, scale, add, at, out, partial,
        gradient.stride(0), x.stride(0), 0 if add is None else add.stride(0), out.stride(0), n,
        **tuning.options,
    )  # fmt: skip
    columns = _columns_tuning(width)
    grid = (-(-width // columns.constexprs["COLUMNS"]),)
    _add_columns[grid](partial, weight_gradient, programs, **columns.options)


def launches(shape: Shape, dtype: torch.dtype, device: Device) -> list[Launch]:
    """The norms of a drafter's training step, in the forms that it launches."""
    del device  # the same everywhere: no shared memory but for sums over a row
    H = shape.hidden
    return [
        *(_norm_launch(H, dtype, index, add) for index in (False, True) for add in (False, True)),
        *(
            _backward_launch(H, dtype, index=index, add=add, at=at, accumulate=accumulate)
            for index, add, at, accumulate in (
                (False, False, False, False),
                (False, True, False, False),
                (True, False, True, False),
                (True, False, True, True),
                (True, True, True, True),
            )
        ),
        Launch(
            "add_columns",
            _add_columns,
            {"partial": "*fp32", "out": "*fp32", "rows": "i32"},
            _columns_tuning(H),
        ),
    ]


def _norm_launch(width: int, dtype: torch.dtype, index: bool, add: bool) -> Launch:
    row, strides = pointer(dtype), ("x_stride", "residual_stride", "total_stride", "out_stride")
    pointers = {"x": row, "weight": row, "out": row, "scale": "*fp32"}
    pointers |= {"index": "*i64"} if index else {}
    pointers |= {"residual": row, "total": row} if add else {}
    return Launch(
        ("add_rms_norm" if add else "rms_norm") + ("_index" if index else ""),
        _norm,
        {**pointers, **dict.fromkeys(strides, "i32"), "eps": "fp32"},
        _row_tuning(width),
        strides,
    )


def _backward_launch(
    width: int, dtype: torch.dtype, *, index: bool, add: bool, at: bool, accumulate: bool
) -> Launch:
    row, strides = pointer(dtype), ("gradient_stride", "x_stride", "add_stride", "out_stride")
    pointers = dict.fromkeys(("gradient", "x", "weight", "out"), row)
    pointers |= dict.fromkeys(("scale", "partial"), "*fp32")
    pointers |= {"index": "*i64"} if index else {}
    pointers |= {"add": row} if add else {}
    pointers |= {"at": "*i64"} if at else {}
    parts = (("index", index), ("add", add), ("at", at), ("accumulate", accumulate))
    return Launch(
        "_".join(["rms_norm_backward", *(name for name, there in parts if there)]),
        _norm_backward,
        {**pointers, **dict.fromkeys(strides, "i32"), "rows": "i32"},
        _backward_tuning(width, accumulate),
        strides,
    )
