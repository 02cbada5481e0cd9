"""Rows, judge and adamw on a GPU, against the plain forms in float64 on the CPU."""

import pytest
import torch
from torch import Tensor

from pipeline.kernels import adamw, judge, rows
from tests.kernels.comparing import (
    Case,
    Side,
    add_norm,
    cases,
    judged,
    norm,
    norm_backward,
    updated,
)

pytestmark = pytest.mark.gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LARGE: dict[str, Case] = {
    "norm": lambda s: norm(s, 701, 7168, indexed=True, strided=True),
    "add-norm": lambda s: add_norm(s, 701, 7168, indexed=True, in_place=True),
    "backward": lambda s: norm_backward(s, 701, 7168, indexed=True, at=True, accumulate=True),
    "backward-4096": lambda s: norm_backward(
        s, 1501, 4096, indexed=False, at=False, accumulate=False, into="gradient"
    ),
    "judge-kl": lambda s: judged(s, 150, 41, 32000, kind="kl", learns=True),
    "judge-tv": lambda s: judged(s, 150, 41, 32000, kind="tv", learns=True),
    "adamw": lambda s: updated(s, 3_000_001, factor=0.5, copied=True),
}
"""The widths of large drafters: full blocks, several rows a program."""

SMALL = cases(333, (1000,), 5000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGE)
def test_the_triton_form_agrees_with_the_plain_form(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    LARGE[name](Side(rows, rows, judge, adamw, "cuda", DTYPES[dtype]))


@pytest.mark.parametrize("name", SMALL)
def test_it_does_so_for_odd_sizes_and_few_rows(name: str) -> None:
    """In bfloat16 alone: each is a compilation."""
    torch.manual_seed(0)
    SMALL[name](Side(rows, rows, judge, adamw, "cuda", torch.bfloat16))


def on_gpu(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def test_row_offsets_beyond_31_bits_are_right() -> None:
    """The last row of a tensor of more than 2**31 elements; 4.3 GiB."""
    n, width = 2**31 // 24576 + 2, 12288
    gate_up, out = on_gpu(1, 2 * width).expand(n, -1).contiguous(), on_gpu(n, width)
    rows.swiglu(gate_up, out=out)
    assert torch.equal(out[-1], out[0])
    gradient = torch.ones_like(out)
    rows.swiglu_backward(gate_up, gradient)
    assert torch.equal(gate_up[-1], gate_up[0])
    assert torch.equal(gradient[-1], out[0])  # the two forms make the same bits


def test_the_same_input_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    gradient, x, weight = on_gpu(5000, 7168), on_gpu(5000, 7168), on_gpu(7168)
    scale, out = torch.rand(5000, device="cuda"), torch.empty_like(x)
    logits, teacher = on_gpu(500, 32000), on_gpu(100, 32000)
    found = []
    for _ in range(3):
        by_weight = torch.zeros(7168, device="cuda")
        rows.rms_norm_backward(gradient, x, weight, scale, out=out, weight_gradient=by_weight)
        slope, sums = logits.clone(), torch.zeros(3, 5, device="cuda", dtype=torch.float64)
        places = torch.arange(500, device="cuda")
        judge.judge(
            slope, teacher, places // 5, places, scale[:500], places % 5,
            sums=sums, kind="kl", learns=True,
        )  # fmt: skip
        found.append((out.clone(), by_weight, slope, sums))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))
