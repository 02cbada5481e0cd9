import pytest
import torch
from torch import nn

from pipeline.training.errors import CheckpointError
from pipeline.training.optimizer import MasterAdamW


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.full((2, 2), 4.0))
        self.norm = nn.Parameter(torch.ones(2))


def optimizer(model: nn.Module, *, dtype=torch.float32, weight_decay: float = 0.0) -> MasterAdamW:
    return MasterAdamW(model, dtype=dtype, betas=(0.9, 0.95), weight_decay=weight_decay)


def backward(model: Small, made: MasterAdamW, *, scale: float = 1.0) -> None:
    (scale * (model.matrix.sum() + model.norm.sum())).backward()
    made.collect()


def test_gradients_of_packs_add_up():
    model = Small()
    made = optimizer(model)
    backward(model, made, scale=2.0)
    backward(model, made, scale=1.0)
    assert made.gradient.tolist() == [3.0] * 6
    assert made.norm() == pytest.approx((9 * 6) ** 0.5)
    made.zero()
    assert made.norm() == 0


def test_a_first_step_moves_by_the_learning_rate():
    model = Small()
    made = optimizer(model)
    backward(model, made, scale=5.0)
    made.step(0.5, norm=made.norm(), clip_norm=0)
    assert model.matrix.flatten().tolist() == pytest.approx([3.5] * 4)


def test_norms_are_not_decayed():
    model = Small()
    made = optimizer(model, weight_decay=0.1)
    made.step(0.5, norm=0.0, clip_norm=0)
    assert model.norm.tolist() == [1.0, 1.0]
    assert model.matrix.flatten().tolist() == pytest.approx([3.8] * 4)  # 4 * (1 - 0.05)


def test_a_large_gradient_is_clipped_to_the_norm():
    model = Small()
    made = optimizer(model)
    backward(model, made, scale=100.0)
    made.step(0.1, norm=made.norm(), clip_norm=2.0)
    assert made.norm() == pytest.approx(2.0)


def test_bfloat16_masters_keep_updates_that_bfloat16_would_lose():
    model = Small()
    made = optimizer(model, dtype=torch.bfloat16)
    for _ in range(10):
        made.zero()
        backward(model, made)
        made.step(1e-3, norm=made.norm(), clip_norm=0)
    assert model.matrix.dtype == torch.bfloat16
    assert made.model_tensors()["matrix"].tolist()[0] == pytest.approx([3.99, 3.99])
    assert torch.equal(model.matrix, made.model_tensors()["matrix"].bfloat16())
    assert torch.tensor(3.999).bfloat16() == 4.0  # a single step is lost in bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype):
    straight, model = Small(), Small()
    whole, first = optimizer(straight, dtype=dtype), optimizer(model, dtype=dtype)
    for made, owner in ((whole, straight), (first, model)):
        backward(owner, made)
        made.step(0.1, norm=made.norm(), clip_norm=1.0)
    again = Small()
    second = optimizer(again, dtype=dtype)
    second.restore(first.model_tensors(), state=first.state_tensors())
    for made, owner in ((whole, straight), (second, again)):
        made.zero()
        backward(owner, made, scale=-0.3)
        made.step(0.05, norm=made.norm(), clip_norm=1.0)
    assert torch.equal(straight.matrix, again.matrix)
    for name, tensor in whole.state_tensors().items():
        assert torch.equal(tensor, second.state_tensors()[name])


@pytest.mark.parametrize("change", ["missing", "shape", "extra"])
def test_tensors_of_another_drafter_are_refused(change: str):
    made = optimizer(Small())
    model = dict(made.model_tensors())
    if change == "missing":
        del model["norm"]
    elif change == "shape":
        model["norm"] = torch.ones(3)
    else:
        model["more"] = torch.ones(3)
    with pytest.raises(CheckpointError, match=r"norm|more"):
        made.restore(model, state=made.state_tensors())
