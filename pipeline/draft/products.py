"""Matrix products into tensors that are there already, and sums of products in a wider dtype."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Writes a @ b to out. a [n, m], b [m, p], out [n, p]; of one dtype, any of them strided."""
    torch.mm(a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    """Adds a @ b to total, or writes it when `fresh`; the sum is made in total's dtype.

    a [n, m] and b [m, p] of one dtype, total [n, p] of that or a wider one.
    """
    if total.dtype == a.dtype:
        if fresh:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif total.is_cuda:
        # The product's own float32 sums go straight into the total: no bf16 copy of it is made.
        if fresh:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif fresh:
        total.copy_(a @ b)
    else:
        total += a @ b
