"""Row kernels, plain form, against autograd over the formulas in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.kernels import rows

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


def same(found: Tensor, wanted: Tensor | None) -> None:
    assert wanted is not None
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)


def test_a_norm_is_that_of_torch_at_the_rows_asked_for() -> None:
    x, weight, index = leaf(7, 12), leaf(12), torch.tensor([3, 1, 6, 3])
    out, scale = torch.empty(4, 20, dtype=DOUBLE)[:, 3:15], torch.empty(4, dtype=DOUBLE)
    with torch.no_grad():
        rows.rms_norm(x, weight, eps=1e-3, out=out, scale=scale, index=index)
    same(out, functional.rms_norm(x[index], (12,), weight, 1e-3))
    same(scale, (x[index].square().mean(-1) + 1e-3).rsqrt())


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("index", [None, torch.tensor([2, 0, 5, 1, 1])])
def test_a_sum_and_its_norm(index: Tensor | None, in_place: bool) -> None:
    x, weight = torch.randn(5, 12, dtype=DOUBLE), torch.randn(12, dtype=DOUBLE)
    residual = torch.randn(5 if index is None else 6, 12, dtype=DOUBLE)
    wanted = x + (residual if index is None else residual[index])
    total = x if in_place else torch.empty_like(x)
    out, scale = torch.empty_like(x), torch.empty(5, dtype=DOUBLE)
    rows.add_rms_norm(x, residual, weight, eps=1e-5, total=total, out=out, scale=scale, index=index)
    same(total, wanted)
    same(out, functional.rms_norm(wanted, (12,), weight, 1e-5))


def test_a_sum_in_bfloat16_is_rounded_before_it_is_normed() -> None:
    x, residual = torch.tensor([[256.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 0.0]]).bfloat16()
    total, out, scale = torch.empty_like(x), torch.empty_like(x), torch.empty(1)
    weight = torch.ones(2).bfloat16()
    rows.add_rms_norm(x, residual, weight, eps=0.0, total=total, out=out, scale=scale)
    assert total.tolist() == [[256.0, 1.0]]  # 257 is no bfloat16
    assert scale.item() == pytest.approx((2 / (256**2 + 1)) ** 0.5, rel=1e-6)


def gradients(x: Tensor, weight: Tensor, taken: Tensor, gradient: Tensor) -> Tensor:
    """Fills x.grad and weight.grad; gives scale."""
    functional.rms_norm(taken, taken.shape[-1:], weight, 1e-3).backward(gradient)
    return (taken.detach().square().mean(-1) + 1e-3).rsqrt()


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("add", [None, torch.full((4, 12), 0.5, dtype=DOUBLE)])
def test_a_norms_gradient_goes_where_it_is_sent(add: Tensor | None, accumulate: bool) -> None:
    x, weight, index = leaf(7, 12), leaf(12), torch.tensor([3, 1, 6, 0])
    gradient = torch.randn(4, 12, dtype=DOUBLE)
    scale = gradients(x, weight, x[index], gradient)
    out, by_weight = torch.ones(7, 12, dtype=DOUBLE), torch.ones(12, dtype=DOUBLE)
    with torch.no_grad():
        rows.rms_norm_backward(
            gradient, x, weight, scale, out=out, weight_gradient=by_weight,
            index=index, add=add, at=index, accumulate=accumulate,
        )  # fmt: skip
    assert x.grad is not None
    beside = 0.0 if add is None else 0.5
    same(out[index], x.grad[index] + beside + float(accumulate))
    same(out[[2, 4, 5]], torch.ones(3, 12, dtype=DOUBLE))
    same(by_weight - 1, weight.grad)


@pytest.mark.parametrize("into", ["gradient", "add"])
def test_a_norms_gradient_may_replace_what_it_was_made_of(into: str) -> None:
    x, weight, gradient, add = leaf(5, 12), leaf(12), leaf(5, 12).detach(), leaf(5, 12).detach()
    scale = gradients(x, weight, x, gradient)
    assert x.grad is not None
    wanted = x.grad + add
    out, by_weight = {"gradient": gradient, "add": add}[into], torch.zeros(12, dtype=DOUBLE)
    with torch.no_grad():
        rows.rms_norm_backward(
            gradient, x, weight, scale, out=out, weight_gradient=by_weight, add=add
        )
    same(out, wanted)
    same(by_weight, weight.grad)


def test_a_norms_gradient_is_added_to_rows_in_order() -> None:
    x, weight, gradient = leaf(5, 12), leaf(12), leaf(5, 12).detach()
    scale = gradients(x, weight, x, gradient)
    out, by_weight = torch.ones(5, 12, dtype=DOUBLE), torch.zeros(12, dtype=DOUBLE)
    with torch.no_grad():
        rows.rms_norm_backward(
            gradient, x, weight, scale, out=out, weight_gradient=by_weight, accumulate=True
        )
    assert x.grad is not None
    same(out, x.grad + 1)


def test_the_gated_unit_forward_and_backward_in_place() -> None:
    gate_up, gradient = leaf(5, 14), torch.randn(5, 7, dtype=DOUBLE)
    gate, up = gate_up.chunk(2, -1)
    wanted = functional.silu(gate) * up
    wanted.backward(gradient)
    held, out = gate_up.detach().clone(), torch.empty(5, 9, dtype=DOUBLE)[:, 1:8]
    rows.swiglu(held, out=out)
    same(out, wanted)
    rows.swiglu_backward(held, gradient)
    same(held, gate_up.grad)
    same(gradient, wanted)


def turned(x: Tensor, cos: Tensor, sin: Tensor, heads: int, rotated: int) -> Tensor:
    """The formula: half-split pairs of the first heads, as complex numbers."""
    low, high = x.unflatten(-1, (heads, -1)).chunk(2, -1)
    made = torch.complex(low, high) * torch.complex(cos, sin)[:, None]
    both = torch.cat([made.real, made.imag], -1)
    return torch.cat([both[:, :rotated], torch.cat([low, high], -1)[:, rotated:]], 1).flatten(1)


def table(P: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(P, half, dtype=DOUBLE) * 6
    return angle.cos(), angle.sin()


def test_heads_are_turned_after_the_addition_and_values_are_not() -> None:
    x, source = torch.randn(5, 24, dtype=DOUBLE), torch.randn(4, 24, dtype=DOUBLE)
    (cos, sin), position = table(9, 4), torch.tensor([0, 2, 8, 3, 3])
    index = torch.tensor([0, 1, 3, 2, 2])
    wanted = turned(x + source[index], cos[position], sin[position], 3, 2)
    rows.add_rotate(x, cos, sin, position, source=source, index=index, heads=3, rotated=2)
    same(x, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_source", [True, False])
def test_turning_back_undoes_turning(with_source: bool, dtype: torch.dtype) -> None:
    """For any x; source is wide and stays as it is."""
    (cos, sin), position = table(9, 4), torch.tensor([0, 2, 8, 3, 3])
    wide = torch.promote_types(dtype, torch.float32)
    wanted = torch.randn(5, 24, dtype=DOUBLE)
    x = turned(wanted, cos[position], sin[position], 3, 2)
    source = x.to(wide) if with_source else None
    held = torch.zeros(5, 24, dtype=dtype) if with_source else x.to(dtype)
    rows.rotate_back(held, cos.to(wide), sin.to(wide), position, heads=3, rotated=2, source=source)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(held.double(), wanted, rtol=bound, atol=bound)
    assert source is None or torch.equal(source, x.to(wide))


def test_rows_are_summed_by_name() -> None:
    source = torch.randn(6, 5, dtype=DOUBLE)
    sources = torch.tensor([[0, -1, 3, 5], [2, -1, -1, 5]])
    out = torch.empty(4, 9, dtype=DOUBLE)[:, 2:7]
    rows.gather_sum(source, sources, out=out)
    nothing = torch.zeros(5, dtype=DOUBLE)
    same(out, torch.stack([source[0] + source[2], nothing, source[3], 2 * source[5]]))


def test_a_sum_of_bfloat16_rows_is_wide() -> None:
    source, out = torch.tensor([[256.0], [1.0]]).bfloat16(), torch.empty(1, 1).bfloat16()
    rows.gather_sum(source, torch.tensor([[0], [1], [1]]), out=out)
    assert out.item() == 258.0


def _gated(given: Tensor, out: Tensor) -> None:
    rows.swiglu(given.repeat(1, 2), out=out)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "norm": lambda x, out: rows.rms_norm(
        x, torch.ones(600), eps=1e-5, out=out, scale=torch.empty(len(x))
    ),
    "backward": lambda x, out: rows.rms_norm_backward(
        x, x.flip(0), torch.ones(600), torch.rand(len(x)) + 1, out=out,
        weight_gradient=torch.zeros(600),
    ),
    "gated": _gated,
    "sums": lambda x, out: rows.gather_sum(
        x, torch.arange(2 * len(x)).reshape(2, -1) % max(1, len(x)), out=out
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_of_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(11, 600)
    torch.manual_seed(1)
    whole, parts = torch.empty(11, 600), torch.empty(11, 600)
    FUNCTIONS[name](x, whole)
    monkeypatch.setattr(rows, "_BLOCK_ELEMENTS", 1300)
    torch.manual_seed(1)
    FUNCTIONS[name](x, parts)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_rows_are_no_trouble(name: str) -> None:
    FUNCTIONS[name](torch.empty(0, 600), torch.empty(0, 600))
