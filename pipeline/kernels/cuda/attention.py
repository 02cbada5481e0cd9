# mypy: allow-untyped-calls
"""Attention on a GPU: launches, and block sizes by device. The kernels are in attention_kernels."""

import functools

import torch
import triton
from torch import Tensor

from pipeline.kernels.cuda.attention_kernels import (
    attend_kernel,
    keys_kernel,
    own_kernel,
    query_kernel,
    ranges_kernel,
)
from pipeline.kernels.cuda.blocks import (
    Device,
    Launch,
    Shape,
    Tuning,
    device_of,
    pointer,
    power_of_two,
)


def attend(
    query: Tensor,
    keys: Tensor,
    own: Tensor,
    own_at: Tensor,
    start: Tensor,
    limit: Tensor,
    *,
    kv: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """`pipeline.kernels.attention.attend` on a GPU."""
    n, heads, d = _sizes(query, keys, kv)
    if n == 0:
        return
    tuning = tuned("attend", heads // kv, kv, d, query.dtype, device_of(query.device))
    grid = (heads, triton.cdiv(n, tuning.constexprs["BLOCK_M"]))
    attend_kernel[grid](
        query, keys, own, own_at, start, limit, out, lse,
        n, own_at.shape[0], query.stride(0), keys.stride(0), own.stride(0), own_at.stride(0),
        out.stride(0), lse.stride(0), d**-0.5, **tuning.options,
    )  # fmt: skip


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    own: Tensor,
    own_at: Tensor,
    start: Tensor,
    limit: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    kv: int,
    delta: Tensor,
    d_query: Tensor,
    d_own: Tensor,
) -> None:
    """`pipeline.kernels.attention.attend_backward` on a GPU: all but the step-0 keys."""
    n, heads, d = _sizes(query, keys, kv)
    if n == 0:
        return
    sizes = (heads // kv, kv, d, query.dtype, device_of(query.device))
    tuning = tuned("query", *sizes)
    query_kernel[(heads, triton.cdiv(n, tuning.constexprs["BLOCK_M"]))](
        gradient, query, keys, own, own_at, start, limit, out, lse, delta, d_query,
        n, own_at.shape[0], gradient.stride(0), query.stride(0), keys.stride(0), own.stride(0),
        own_at.stride(0), out.stride(0), lse.stride(0), delta.stride(0), d_query.stride(0),
        d**-0.5, **tuning.options,
    )  # fmt: skip
    if own_at.shape[0] == 0:
        return
    tuning = tuned("own", *sizes)
    own_kernel[(triton.cdiv(n, tuning.constexprs["BLOCK_M"]), kv, own_at.shape[0])](
        gradient, query, own, own_at, lse, delta, d_own,
        n, gradient.stride(0), query.stride(0), own.stride(0), own_at.stride(0), lse.stride(0),
        delta.stride(0), d_own.stride(0), d**-0.5, **tuning.options,
    )  # fmt: skip


def attend_backward_keys(
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    lse: Tensor,
    delta: Tensor,
    start: Tensor,
    limit: Tensor,
    steps: tuple[tuple[int, int], ...],
    *,
    kv: int,
    d_keys: Tensor,
) -> None:
    """`pipeline.kernels.attention.attend_backward_keys`; on a GPU: all of d_keys is written.

    Takes 8 bytes a stack row and head, and 16 a step and key block.
    """
    m, heads, d = _sizes(query, keys, kv)
    n = keys.shape[0]
    if n == 0:
        return
    sizes = (heads // kv, kv, d, query.dtype, device_of(query.device))
    tuning, finding = tuned("keys", *sizes), tuned("ranges", *sizes)
    blocks = triton.cdiv(n, tuning.constexprs["BLOCK_N"])
    ranges = torch.empty(len(steps), blocks, 4, dtype=torch.int32, device=query.device)
    # A launch a step: bounds copied to the device as a tensor would make the host wait for it.
    for step, (first, last) in enumerate(steps):
        ranges_kernel[(triton.cdiv(blocks, finding.constexprs["WIDTH"]),)](
            start, limit, ranges[step], first, last, blocks, n, **finding.options
        )
    keys_kernel[(kv, blocks)](
        gradient, query, keys, lse.t().contiguous(), delta.t().contiguous(), start, limit, ranges,
        d_keys, n, m, len(steps), blocks, gradient.stride(0), query.stride(0), keys.stride(0),
        d_keys.stride(0), d**-0.5, **tuning.options,
    )  # fmt: skip


def _sizes(query: Tensor, keys: Tensor, kv: int) -> tuple[int, int, int]:
    """Rows, heads, head width."""
    d = keys.shape[1] // (2 * kv)
    assert query.dtype.itemsize <= 4, "products are made in float32"
    return query.shape[0], query.shape[1] // d, d


@functools.cache
def tuned(kernel: str, groups: int, kv: int, d: int, dtype: torch.dtype, device: Device) -> Tuning:
    """How `kernel` (attend, query, own, keys or ranges) is compiled: blocks by device and dtype."""
    wide = power_of_two(max(d, 16))  # 16 is the least side of a product
    sizes = {"KV": kv, "GROUPS": groups, "D": d, "BLOCK_D": wide}
    rows, columns, warps, stages = _blocks(kernel, wide, dtype, device)
    if kernel == "ranges":
        columns = _blocks("keys", wide, dtype, device)[1]
        return Tuning({"BLOCK_N": columns, "WIDTH": 64}, num_warps=2)
    if kernel == "own":
        return Tuning({**sizes, "BLOCK_M": rows}, num_warps=warps)
    return Tuning({**sizes, "BLOCK_M": rows, "BLOCK_N": columns}, warps, stages)


def _blocks(
    kernel: str, wide: int, dtype: torch.dtype, device: Device
) -> tuple[int, int, int, int]:
    """Rows, keys, warps and stages; as large as registers take without spilling in a loop."""
    if kernel in ("own", "ranges"):
        return max(16, 2048 // wide), 0, 4, 1
    if dtype.itemsize == 4 or wide > 128:
        # Without tensor cores, or with rows too wide for large blocks.
        side = 32 if wide * dtype.itemsize <= 512 else 16
        return side, side, 8, 1
    if device.shared_bytes >= 200_000:
        # The fastest of fourteen, measured on an H200 with documents of 100, 1024 and 4096 tokens;
        # 128 rows gain 6 % with the longest and lose up to 30 % elsewhere.
        hopper = {"attend": (64, 64, 4, 2), "query": (64, 64, 4, 2), "keys": (32, 64, 4, 3)}
        return hopper[kernel]
    return {"attend": (64, 64, 4, 2), "query": (64, 32, 4, 2), "keys": (64, 64, 8, 2)}[kernel]


def launches(shape: Shape, dtype: torch.dtype, device: Device) -> list[Launch]:
    """Every kernel here as a drafter of this shape launches it."""
    kv, d, groups = shape.kv, shape.head_dim, shape.heads // shape.kv
    strides = {
        **dict.fromkeys(("gradient_stride", "query_stride", "out_stride", "d_query_stride"),
                        shape.heads * d),
        **dict.fromkeys(("keys_stride", "own_stride", "d_own_stride", "d_keys_stride"), 2 * kv * d),
        **dict.fromkeys(("lse_stride", "delta_stride"), shape.heads),
    }  # fmt: skip
    types = {
        **dict.fromkeys(("lse", "delta", "d_own", "d_keys"), "*fp32"),
        **dict.fromkeys(("own_at", "start", "limit"), "*i64"),
        **dict.fromkeys(("gradient", "query", "keys", "own", "out", "d_query"), pointer(dtype)),
        "ranges": "*i32",
        "scale": "fp32",
    }
    found = []
    for name, kernel in (
        ("attend", attend_kernel), ("query", query_kernel), ("own", own_kernel),
        ("ranges", ranges_kernel), ("keys", keys_kernel),
    ):  # fmt: skip
        tuning = tuned(name, groups, kv, d, dtype, device)
        arguments = [name for name in kernel.arg_names if name not in tuning.constexprs]
        aligned = tuple(name for name in arguments if strides.get(name, 1) % 16 == 0)
        signature = {name: types.get(name, "i32") for name in arguments}
        found.append(Launch(f"attention_{name}", kernel, signature, tuning, aligned))
    return found
