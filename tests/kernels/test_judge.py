"""The loss by row, plain form, against autograd over its formula in float64."""

import pytest
import torch
from torch import Tensor

from pipeline.kernels import judge as room
from pipeline.kernels.judge import LossKind, judge

KINDS: tuple[LossKind, ...] = ("kl", "tv")


def example(asked: int = 9, teachers: int = 4, D: int = 11) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "logits": torch.randn(asked, D, dtype=torch.float64),
        "teacher": torch.randn(teachers, D, dtype=torch.float64),
        "rows": torch.randint(0, teachers, (asked,)),
        "label": torch.randint(-1, D, (asked,)),
        "weight": torch.rand(asked, dtype=torch.float64),
        "step": torch.randint(0, 3, (asked,)),
    }


def formula(given: dict[str, Tensor], kind: LossKind) -> tuple[Tensor, Tensor]:
    """Slope by logit of the weighted loss, and sums [3, 3] by step."""
    logits = given["logits"].clone().requires_grad_()
    p, q = given["teacher"].softmax(-1)[given["rows"]], logits.softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    loss = -(p * q.log()).sum(-1) if kind == "kl" else 1 - overlap
    (loss * given["weight"]).sum().backward()
    facts = torch.stack([loss, (q.argmax(-1) == given["label"]).double(), overlap]).detach()
    sums = torch.stack([facts[:, given["step"] == k].sum(1) for k in range(3)], 1)
    assert logits.grad is not None
    return logits.grad, sums


@pytest.mark.parametrize("kind", KINDS)
def test_slope_and_sums_are_those_of_the_formula(kind: LossKind) -> None:
    given = example()
    slope, wanted = formula(given, kind)
    sums = torch.ones(3, 3, dtype=torch.float64)
    judge(**given, sums=sums, kind=kind, learns=True)
    torch.testing.assert_close(given["logits"], slope, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sums - 1, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_looking_leaves_the_logits_alone(kind: LossKind) -> None:
    given = example()
    before, (_, wanted) = given["logits"].clone(), formula(given, kind)
    sums = torch.zeros(3, 3, dtype=torch.float64)
    judge(**given, sums=sums, kind=kind, learns=False)
    assert torch.equal(given["logits"], before)
    torch.testing.assert_close(sums, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_rows_change_nothing(kind: LossKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that follow one another, in the first block, and rows that do not."""
    given = example()
    given["rows"][:4] = torch.arange(4)
    slope, wanted = formula(given, kind)
    monkeypatch.setattr(room, "_BLOCK_ELEMENTS", 4 * 11)
    sums = torch.zeros(3, 3, dtype=torch.float64)
    judge(**given, sums=sums, kind=kind, learns=True)
    torch.testing.assert_close(given["logits"], slope, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sums, wanted, rtol=1e-12, atol=1e-12)


def test_a_label_outside_the_draft_vocabulary_is_never_hit() -> None:
    given = example()
    given["label"] = given["logits"].argmax(-1)
    given["label"][::2] = -1
    sums = torch.zeros(3, 3, dtype=torch.float64)
    judge(**given, sums=sums, kind="kl", learns=False)
    assert sums[1].sum() == 4


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_logits_are_judged_wide(kind: LossKind) -> None:
    given = example(D=300)
    given["logits"] = given["logits"].bfloat16()
    given["teacher"] = given["teacher"].bfloat16()
    slope, wanted = formula({n: t.double() if t.is_floating_point() else t
                             for n, t in given.items()}, kind)  # fmt: skip
    given["weight"] = given["weight"].float()
    sums = torch.zeros(3, 3, dtype=torch.float64)
    judge(**given, sums=sums, kind=kind, learns=True)
    assert given["logits"].dtype == torch.bfloat16
    torch.testing.assert_close(given["logits"].double(), slope, rtol=2**-8, atol=1e-7)
    torch.testing.assert_close(sums, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("teachers", [0, 4])
def test_no_rows_are_no_trouble(teachers: int) -> None:
    given = {name: t[:0] for name, t in example().items()}
    given["teacher"] = example()["teacher"][:teachers]
    sums = torch.zeros(3, 3, dtype=torch.float64)
    judge(**given, sums=sums, kind="kl", learns=True)
    assert not sums.any()
