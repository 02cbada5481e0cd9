"""Row kernels: norms, the gated unit, rotations and gathers, forward and backward.

Legend: n rows, H their width; wide dtype: float32, or the tensor's own when that is wider. Every
index is int64. Rows of any tensor may be strided; its last dimension is contiguous.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 18
"""Elements a block of rows of the plain forms: 1 MiB float32, so that it stays in a core's cache.

Measured on two cores, 6000 rows of 1536: `swiglu_backward` 24 ms, over all rows at once 82 ms."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: Tensor,
    scale: Tensor,
    index: Tensor | None = None,
) -> None:
    """Writes out[i] = x[index[i]] * scale[i] * weight and scale[i] = 1 / sqrt(mean(x**2) + eps).

    x [m, H]; weight [H]; index [n], None for x as it is. out [n, H]; scale [n], wide.
    """
    if x.is_cuda:
        from pipeline.kernels.cuda import norms

        norms.rms_norm(x, weight, eps=eps, out=out, scale=scale, index=index)
        return
    for block in _blocks(out):
        taken = x[block] if index is None else x.index_select(0, index[block])
        _norm(taken, weight, eps=eps, out=out[block], scale=scale[block])


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    total: Tensor,
    out: Tensor,
    scale: Tensor,
    index: Tensor | None = None,
) -> None:
    """Writes total[i] = x[i] + residual[index[i]], in its dtype, and the norm of that to out.

    x, total, out [n, H]; total may be x. residual [m, H]; index [n]. scale [n], as in `rms_norm`.
    """
    if x.is_cuda:
        from pipeline.kernels.cuda import norms

        norms.add_rms_norm(
            x, residual, weight, eps=eps, total=total, out=out, scale=scale, index=index
        )
        return
    for block in _blocks(out):
        taken = residual[block] if index is None else residual.index_select(0, index[block])
        torch.add(x[block], taken, out=total[block])
        _norm(total[block], weight, eps=eps, out=out[block], scale=scale[block])


def rms_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    out: Tensor,
    weight_gradient: Tensor,
    index: Tensor | None = None,
    add: Tensor | None = None,
    at: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """The gradient of `rms_norm` by its input, and by its weight.

    gradient [n, H], by out; x, weight, index, scale: as in `rms_norm`. add [n, H]: a gradient that
    reaches x beside the norm, added. out[at[i]] is written, or added to when `accumulate`; at [n],
    distinct, None for i itself (then out may be `add` or `gradient`). weight_gradient [H], wide, is
    added to.
    """
    if x.is_cuda:
        from pipeline.kernels.cuda import norms

        norms.rms_norm_backward(
            gradient,
            x,
            weight,
            scale,
            out=out,
            weight_gradient=weight_gradient,
            index=index,
            add=add,
            at=at,
            accumulate=accumulate,
        )
        return
    wide = scale.dtype
    weight = weight.to(wide)
    for block in _blocks(gradient):
        taken = (x[block] if index is None else x.index_select(0, index[block])).to(wide)
        given, by = gradient[block].to(wide), scale[block]
        product = given * taken
        weight_gradient += by @ product
        pull = by**3 * (product @ weight) / x.shape[-1]
        torch.mul(given, weight, out=product).mul_(by[:, None])
        product.addcmul_(taken, pull[:, None], value=-1)
        if add is not None:
            product += add[block]
        if at is None and accumulate:
            out[block] += product
        elif at is None:
            out[block] = product
        elif accumulate:
            product += out.index_select(0, at[block])
            out.index_copy_(0, at[block], product.to(out.dtype))
        else:
            out.index_copy_(0, at[block], product.to(out.dtype))


def swiglu(gate_up: Tensor, *, out: Tensor) -> None:
    """Writes silu(gate) * up to out [n, I]. gate_up [n, 2I], gate first."""
    if gate_up.is_cuda:
        from pipeline.kernels.cuda import rows as fused

        fused.swiglu(gate_up, out=out)
        return
    wide = _wide(gate_up)
    for block in _blocks(out):
        gate, up = gate_up[block].to(wide).chunk(2, -1)
        held = out[block] if out.dtype == wide else torch.empty_like(gate)
        torch.ops.aten.silu.out(gate, out=held)
        held *= up
        if out.dtype != wide:
            out[block] = held


def swiglu_backward(gate_up: Tensor, gradient: Tensor) -> None:
    """The gradient of `swiglu`, in place: gate_up [n, 2I] becomes its own gradient.

    gradient [n, I], by the output, becomes the output silu(gate) * up, which `down` multiplies.
    """
    if gate_up.is_cuda:
        from pipeline.kernels.cuda import rows as fused

        fused.swiglu_backward(gate_up, gradient)
        return
    wide = _wide(gate_up)
    for block in _blocks(gradient):
        gate, up = gate_up[block].chunk(2, -1)
        g, u, given = gate.to(wide), up.to(wide), gradient[block].to(wide)
        active, product = torch.ops.aten.silu(g), given * u
        d_up = given * active
        torch.ops.aten.silu_backward.grad_input(product, g, grad_input=product)
        torch.mul(active, u, out=active)
        gate.copy_(product)
        up.copy_(d_up)
        gradient[block] = active


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
    """Adds source[index[i]] to x[i], then turns its first `rotated` heads to position[i]. In place.

    x [n, heads * d]; source [m, heads * d]; index, position [n]. cos, sin [P, d / 2], wide, by
    position; half-split layout: (low, high) -> (low * cos - high * sin, high * cos + low * sin).
    """
    if x.is_cuda:
        from pipeline.kernels.cuda import rows as fused

        fused.add_rotate(
            x, cos, sin, position, source=source, index=index, heads=heads, rotated=rotated
        )
        return
    wide = cos.dtype
    for block in _blocks(x):
        held = x[block].to(wide)  # x itself when it is wide already
        held += source.index_select(0, index[block])
        at = position[block]
        _turn(held, cos[at], sin[at], heads=heads, rotated=rotated)
        if x.dtype != wide:
            x[block] = held


def rotate_back(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    *,
    heads: int,
    rotated: int,
    source: Tensor | None = None,
) -> None:
    """The transposed turn of x's first `rotated` heads, in place: a gradient before `add_rotate`.

    source, of x's shape and wide: x becomes source turned back, in x's dtype. Else as there.
    """
    if x.is_cuda:
        from pipeline.kernels.cuda import rows as fused

        fused.rotate_back(x, cos, sin, position, heads=heads, rotated=rotated, source=source)
        return
    wide = cos.dtype
    for block in _blocks(x):
        held = x[block]
        if source is not None and x.dtype == wide:
            held.copy_(source[block])
        elif source is not None:
            held = source[block].to(wide, copy=True)
        else:
            held = held.to(wide)
        at = position[block]
        _turn(held, cos[at], -sin[at], heads=heads, rotated=rotated)
        if x.dtype != wide:
            x[block] = held


def gather_sum(source: Tensor, sources: Tensor, *, out: Tensor) -> None:
    """Writes out[i] = sum over j of source[sources[j, i]], the sum wide; -1 names nothing.

    source [m, H]; sources [J, n]; out [n, H], any float dtype.
    """
    if source.is_cuda:
        from pipeline.kernels.cuda import rows as fused

        fused.gather_sum(source, sources, out=out)
        return
    named = sources >= 0
    counts = named.sum(0)
    bags = counts.cumsum(0) - counts
    # A bag is a row's list of source rows; one call adds them up without a tensor of [J, n, H].
    out.copy_(
        torch.nn.functional.embedding_bag(
            sources.T[named.T], source.to(_wide(source)), bags, mode="sum"
        )
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices over the rows of x [n, w], each of at most _BLOCK_ELEMENTS elements or one row."""
    rows = max(1, _BLOCK_ELEMENTS // max(1, x.shape[-1]))
    return (slice(low, low + rows) for low in range(0, x.shape[0], rows))


def _norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor, scale: Tensor) -> None:
    wide = scale.dtype
    held = x.to(wide)
    length = torch.linalg.vector_norm(held, dim=-1)
    torch.rsqrt((length * length).div_(x.shape[-1]).add_(eps), out=scale)
    if out.dtype == wide:
        torch.mul(held, scale[:, None], out=out).mul_(weight)
    else:
        out.copy_((held * scale[:, None]).mul_(weight))


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, rotated: int) -> None:
    """Turns x's first `rotated` heads in place: x [b, heads * d], cos and sin [b, d / 2]."""
    low, high = x.view(x.shape[0], heads, -1)[:, :rotated].chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    crossed = high * sin
    high.mul_(cos).addcmul_(low, sin)
    low.mul_(cos).sub_(crossed)
