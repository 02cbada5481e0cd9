# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Row kernels on a GPU, elementwise: bound by memory, each reads and writes every row once.

All is computed in float32, whatever the dtype.
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
    pointer,
    power_of_two,
)


@triton.jit
def _swiglu(gate_up, out, in_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row a program."""
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = gate_up + row * in_stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    made = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(out + row * out_stride + column, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    gate_up, gradient, in_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK columns of one row a program, in place."""
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = gate_up + row * in_stride + column
    goal = gradient + row * out_stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(goal, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    active = gate * share
    by_gate = given * up * (share + active * (1.0 - share))
    tl.store(place, by_gate.to(gate_up.dtype.element_ty), mask=inside)
    tl.store(place + WIDTH, (given * active).to(gate_up.dtype.element_ty), mask=inside)
    tl.store(goal, (active * up).to(gradient.dtype.element_ty), mask=inside)


# Slices of a pack begin anywhere: were their alignment looked at, packs would compile anew.
@triton.jit(do_not_specialize_on_alignment=["index", "position"])
def _turn(
    x,
    source,
    index,
    cos,
    sin,
    position,
    x_stride,
    source_stride,
    HEADS: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BACK: tl.constexpr,
):
    """BLOCK_HEADS heads of one row a program.

    Forward: x plus source's row, turned. BACK: source, or x where there is none, turned back.
    """
    parts: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    row = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS) & (pair < HALF)
    column = head * (2 * HALF) + pair
    place = x + row * x_stride + column
    origin = place
    if BACK and source is not None:
        origin = source + row * source_stride + column
    low = tl.load(origin, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(origin + HALF, mask=inside, other=0.0).to(tl.float32)
    if not BACK:
        beside = source + tl.load(index + row) * source_stride + column
        low += tl.load(beside, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(beside + HALF, mask=inside, other=0.0).to(tl.float32)
    turned = inside & (head < ROTATED)
    angle = tl.load(position + row) * HALF + pair
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    if BACK:
        s = -s
    tl.store(place, (low * c - high * s).to(x.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (high * c + low * s).to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sources_stride"], do_not_specialize_on_alignment=["sources"])
def _gather_sum(
    source,
    sources,
    out,
    source_stride,
    sources_stride,
    out_stride,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row a program."""
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gathered = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(COUNT):
        taken = tl.load(sources + j * sources_stride + row)
        gathered += tl.load(
            source + taken * source_stride + column, mask=inside & (taken >= 0), other=0.0
        ).to(tl.float32)
    made = gathered.to(out.dtype.element_ty)
    tl.store(out + row * out_stride + column, made, mask=inside)


@functools.cache
def _part_tuning(width: int) -> Tuning:
    """Parts of a row: 16 elements a thread and tensor."""
    block = min(2048, power_of_two(width))
    return Tuning({"WIDTH": width, "BLOCK": block}, num_warps=max(1, block // 512))


@functools.cache
def _turn_tuning(width: int, heads: int, rotated: int, back: bool) -> Tuning:
    half = width // heads // 2
    block_half = power_of_two(half)
    block_heads = min(power_of_two(heads), max(1, 1024 // block_half))
    return Tuning(
        {
            "HEADS": heads,
            "ROTATED": rotated,
            "HALF": half,
            "BLOCK_HEADS": block_heads,
            "BLOCK_HALF": block_half,
            "BACK": back,
        },
        num_warps=max(1, block_heads * block_half // 256),
    )


@functools.cache
def _gather_tuning(width: int, count: int) -> Tuning:
    block = min(1024, power_of_two(width))
    return Tuning({"COUNT": count, "WIDTH": width, "BLOCK": block}, num_warps=max(1, block // 256))


def swiglu(gate_up: Tensor, *, out: Tensor) -> None:
    """As `kernels.rows.swiglu`."""
    n, width = out.shape
    if n:
        tuning = _part_tuning(width)
        grid = (n * -(-width // tuning.constexprs["BLOCK"]),)
        _swiglu[grid](gate_up, out, gate_up.stride(0), out.stride(0), **tuning.options)


def swiglu_backward(gate_up: Tensor, gradient: Tensor) -> None:
    """As `kernels.rows.swiglu_backward`."""
    n, width = gradient.shape
    if n:
        tuning = _part_tuning(width)
        grid = (n * -(-width // tuning.constexprs["BLOCK"]),)
        _swiglu_backward[grid](
            gate_up, gradient, gate_up.stride(0), gradient.stride(0), **tuning.options
        )


def add_rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    *,
    source: Tensor,
    index: Tensor,
    heads: int,
    rotated: int,
) -> None:
    """As `kernels.rows.add_rotate`; cos and sin contiguous."""
    n, width = x.shape
    if n:
        tuning = _turn_tuning(width, heads, rotated, False)
        grid = (n * -(-heads // tuning.constexprs["BLOCK_HEADS"]),)
        _turn[grid](
            x, source, index, cos, sin, position, x.stride(0), source.stride(0), **tuning.options
        )


def rotate_back(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    *,
    heads: int,
    rotated: int,
    source: Tensor | None,
) -> None:
    """As `kernels.rows.rotate_back`; cos and sin contiguous."""
    n, width = x.shape
    if n:
        tuning = _turn_tuning(width, heads, rotated, True)
        grid = (n * -(-heads // tuning.constexprs["BLOCK_HEADS"]),)
        _turn[grid](
            x, source, None, cos, sin, position, x.stride(0),
            0 if source is None else source.stride(0), **tuning.options,
        )  # fmt: skip


def gather_sum(source: Tensor, sources: Tensor, *, out: Tensor) -> None:
    """As `kernels.rows.gather_sum`."""
    n, width = out.shape
    if n:
        tuning = _gather_tuning(width, sources.shape[0])
        grid = (n * -(-width // tuning.constexprs["BLOCK"]),)
        _gather_sum[grid](
            source, sources, out, source.stride(0), sources.stride(0), out.stride(0),
            **tuning.options,
        )  # fmt: skip


def launches(shape: Shape, dtype: torch.dtype, device: Device) -> list[Launch]:
    """The row kernels of a drafter's training step, in the forms that it launches."""
    del device  # the same everywhere: no shared memory is used
    query, pair = (shape.heads, shape.heads), (2 * shape.kv, shape.kv)
    d, row = shape.head_dim, pointer(dtype)
    return [
        *(
            Launch(
                name,
                kernel,
                {"gate_up": row, second: row, "in_stride": "i32", "out_stride": "i32"},
                _part_tuning(shape.intermediate),
                ("in_stride", "out_stride"),
            )
            for name, kernel, second in (
                ("swiglu", _swiglu, "out"),
                ("swiglu_backward", _swiglu_backward, "gradient"),
            )
        ),
        _turn_launch("add_rotate_query", dtype, dtype, query, d, back=False),
        _turn_launch("add_rotate_pair", dtype, dtype, pair, d, back=False),
        _turn_launch("rotate_back_query", dtype, None, query, d, back=True),
        _turn_launch("rotate_back_pair", dtype, torch.float32, pair, d, back=True),
        *(
            Launch(
                name,
                _gather_sum,
                {
                    "source": row,
                    "sources": "*i64",
                    "out": row,
                    "source_stride": "i32",
                    "sources_stride": "i32",
                    "out_stride": "i32",
                },
                _gather_tuning(heads * d, 5),
                ("source_stride", "out_stride"),
            )
            for name, (heads, _) in (("gather_sum_query", query), ("gather_sum_pair", pair))
        ),
    ]


def _turn_launch(
    name: str,
    dtype: torch.dtype,
    source: torch.dtype | None,
    heads: tuple[int, int],
    d: int,
    *,
    back: bool,
) -> Launch:
    """heads: all, and those turned."""
    pointers = {"x": pointer(dtype), "cos": "*fp32", "sin": "*fp32", "position": "*i64"}
    pointers |= {} if source is None else {"source": pointer(source)}
    pointers |= {} if back else {"index": "*i64"}
    strides = ("x_stride", "source_stride")
    tuning = _turn_tuning(heads[0] * d, *heads, back)
    return Launch(name, _turn, {**pointers, **dict.fromkeys(strides, "i32")}, tuning, strides)
