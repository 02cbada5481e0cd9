"""The AdamW update, plain form, against torch.optim.AdamW."""

import pytest
import torch

from pipeline.kernels import adamw as room
from pipeline.kernels.adamw import adamw

SETTINGS = {"rate": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_updates_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of them, in blocks, with a factor and a bfloat16 copy."""
    monkeypatch.setattr(room, "_BLOCK_ELEMENTS", 16)
    torch.manual_seed(0)
    master = torch.randn(40, dtype=torch.float64)
    theirs = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    first, second, weight = torch.zeros_like(master), torch.zeros_like(master), master.bfloat16()
    for step in range(1, 6):
        gradient = torch.randn(40, dtype=torch.float64)
        theirs.grad = gradient * 0.5
        optimizer.step()
        adamw(
            weight, master, gradient, first, second,
            **SETTINGS, step=step, factor=torch.tensor(0.5),
        )  # fmt: skip
    torch.testing.assert_close(master, theirs.detach(), rtol=1e-13, atol=1e-15)
    assert torch.equal(weight, master.bfloat16())


def test_a_float32_weight_may_be_the_master_itself() -> None:
    torch.manual_seed(0)
    master, gradient = torch.randn(40), torch.randn(40)
    first, second, apart = torch.zeros(40), torch.zeros(40), master.clone()
    moments, weight = (torch.zeros(40), torch.zeros(40)), torch.empty(40)
    factor = torch.tensor(1.0)
    adamw(weight, apart, gradient, *moments, **SETTINGS, step=1, factor=factor)
    adamw(master, master, gradient, first, second, **SETTINGS, step=1, factor=factor)
    assert torch.equal(master, apart)
    assert torch.equal(weight, apart)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
def test_nothing_changes_when_the_factor_is_not_finite(factor: float) -> None:
    torch.manual_seed(0)
    given = [torch.randn(40) for _ in range(5)]
    before = [tensor.clone() for tensor in given]
    adamw(*given, **SETTINGS, step=1, factor=torch.tensor(factor))
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_the_gradient_is_read_only() -> None:
    torch.manual_seed(0)
    master, gradient = torch.randn(40), torch.randn(40)
    before = gradient.clone()
    moments = torch.zeros(40), torch.zeros(40)
    adamw(master, master, gradient, *moments, **SETTINGS, step=1, factor=torch.tensor(0.5))
    assert torch.equal(gradient, before)
