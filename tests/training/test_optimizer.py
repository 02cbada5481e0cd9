import pytest
import torch

from pipeline.draft.weights import BUCKETS
from pipeline.training.errors import CheckpointError
from pipeline.training.optimizer import MasterAdamW
from pipeline.training.ranks import Ranks
from tests.draft.make import make_config, make_drafter

ALONE = Ranks(0, 1, torch.device("cpu"))
ONE = torch.ones(1, dtype=torch.float64)


def drafter():
    return make_drafter(make_config(), seed=3).float()


def optimizer(model=None, *, dtype=torch.float32, weight_decay: float = 0.0) -> MasterAdamW:
    return MasterAdamW(
        model or drafter(), dtype=dtype, ranks=ALONE, betas=(0.9, 0.95), weight_decay=weight_decay
    )


def set_gradients(made: MasterAdamW, *, seed: int = 0, scale: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(seed)
    for bucket in BUCKETS:
        gradient = getattr(made.gradients, bucket)
        gradient.copy_(scale * torch.randn(gradient.shape, generator=draw))


def update(made: MasterAdamW, rate: float = 0.1, *, clip_norm: float = 0, loss=ONE) -> list[float]:
    report = made.step(rate, clip_norm=clip_norm, sums=loss).wait()
    made.settle(updated=bool(torch.isfinite(report).all()))
    return report.tolist()


def copies(made: MasterAdamW) -> dict[str, torch.Tensor]:
    model, state = made.gather()
    return {name: tensor.clone() for name, tensor in {**model, **state}.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


@pytest.mark.parametrize("clip_norm", [0.0, 2.0, 1000.0])
def test_it_is_adamw_of_torch_after_clipping(clip_norm):
    model, plain = drafter(), drafter()
    made = optimizer(model, weight_decay=0.1)
    named = dict(plain.named_parameters())
    matrices = [p for p in named.values() if p.ndim == 2]
    vectors = [p for p in named.values() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in range(4):
        set_gradients(made, seed=step)
        gradients = made.gradients.by_name(model.config)
        for name, parameter in named.items():
            parameter.grad = gradients[name].clone()
        wanted = torch.nn.utils.clip_grad_norm_(named.values(), clip_norm or float("inf"))
        for group in adam.param_groups:
            group["lr"] = 0.01 * (step + 1)
        adam.step()
        assert update(made, 0.01 * (step + 1), clip_norm=clip_norm)[0] == pytest.approx(
            float(wanted), rel=1e-5
        )
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, named[name], rtol=1e-5, atol=1e-6), name
    assert made.updates == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_parameters_are_the_optimizers_weights(dtype):
    model, before = drafter(), dict(drafter().named_parameters())
    made = optimizer(model, dtype=dtype)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name].to(dtype))
    set_gradients(made)
    update(made)
    weights = made.weights.by_name(model.config)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == weights[name].data_ptr()
        assert not torch.equal(parameter, before[name].to(dtype))
    assert made.parameters == sum(p.numel() for p in before.values())


def test_alone_in_float32_no_weight_is_held_twice():
    model = drafter()
    masters = optimizer(model).gather()[0]
    for name, parameter in model.named_parameters():
        assert masters[name].data_ptr() == parameter.data_ptr()


def test_norms_are_not_decayed():
    made = optimizer(weight_decay=0.1)
    before = copies(made)
    update(made, 0.5)  # by a gradient of zero
    after = copies(made)
    assert torch.equal(after["norm.weight"], before["norm.weight"])
    assert torch.allclose(after["fc.weight"], 0.95 * before["fc.weight"])


def test_bfloat16_masters_keep_updates_that_bfloat16_would_lose():
    model = drafter()
    made = optimizer(model, dtype=torch.bfloat16)
    before = copies(made)["norm.weight"]
    for _ in range(10):
        made.gradients.zero_()
        made.gradients.norms.fill_(1.0)
        update(made, 1e-4)
    after = copies(made)["norm.weight"]
    assert torch.allclose(after, before - 1e-3, rtol=0, atol=1e-6)
    assert model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.norm.weight, after.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype):
    whole, first = optimizer(dtype=dtype), optimizer(dtype=dtype)
    for made in (whole, first):
        set_gradients(made, seed=1)
        update(made, clip_norm=1.0)
    second = optimizer(make_drafter(make_config(), seed=4).float(), dtype=dtype)
    model, state = first.gather()
    second.restore(model, state=state)
    assert second.mark() == first.mark()
    for made in (whole, second):
        set_gradients(made, seed=2)
        update(made, 0.05, clip_norm=1.0)
    assert same(copies(second), copies(whole))
    assert second.updates == 2
    assert second.mark() == whole.mark()


@pytest.mark.parametrize("change", ["missing", "shape", "extra", "dtype"])
def test_tensors_of_another_drafter_are_refused(change: str):
    made = optimizer()
    model, state = (dict(part) for part in made.gather())
    if change == "missing":
        del model["norm.weight"]
    elif change == "shape":
        state["norm.weight.exp_avg"] = torch.ones(3)
    elif change == "extra":
        model["more"] = torch.ones(3)
    else:
        model["norm.weight"] = model["norm.weight"].double()
    with pytest.raises(CheckpointError, match=r"norm.weight|more"):
        made.restore(model, state=state)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    ("gradient", "loss"),
    [(float("nan"), 1.0), (float("inf"), 1.0), (0.0, float("nan")), (0.0, -float("inf"))],
)
def test_nothing_changes_by_a_step_that_is_not_finite(clip_norm, gradient, loss):
    whole, made = optimizer(), optimizer()
    for each in (whole, made):
        set_gradients(each, seed=1)
        update(each, clip_norm=clip_norm)
    before = copies(made)
    set_gradients(made, seed=2)
    made.gradients.o[1, 1] += gradient
    update(made, clip_norm=clip_norm, loss=loss * ONE)
    assert same(copies(made), before)
    for each in (whole, made):
        set_gradients(each, seed=3)
        update(each, clip_norm=clip_norm)
    assert same(copies(made), copies(whole))
    assert made.updates == 2


def test_other_sums_stop_nothing():
    made = optimizer()
    before = copies(made)["fc.weight"]
    set_gradients(made)
    report = made.step(0.1, clip_norm=1.0, sums=torch.tensor([1.0, float("inf")]).double()).wait()
    assert report.tolist()[1:] == [1.0, float("inf")]
    made.settle(updated=True)
    assert not torch.equal(copies(made)["fc.weight"], before)


def test_the_norm_is_that_of_all_gradients():
    made = optimizer()
    for bucket in BUCKETS:
        getattr(made.gradients, bucket).fill_(2.0)
    assert made.norm() == pytest.approx(2 * made.parameters**0.5)
    assert update(made)[0] == pytest.approx(2 * made.parameters**0.5)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_the_mark_sees_one_bit(bucket):
    made = optimizer(dtype=torch.bfloat16)
    before = made.mark()
    getattr(made.weights, bucket).view(torch.int16)[-1, -1] ^= 1
    assert made.mark() != before
