from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.training.batches import PackOrder, packs_ahead
from pipeline.training.errors import NonFinite
from pipeline.training.ranks import Ranks
from pipeline.training.start import Run, start_run
from pipeline.training.step import StepResult, run_step

ALONE = Ranks(0, 1, torch.device("cpu"))


def supervised(tokens: int) -> tuple[int, ...]:
    return tuple(range(4, 4 + tokens))


def begin(request) -> Run:
    return start_run(request, ALONE)[0]


def step(run: Run, packs: list[list[int]], *, clip_norm: float = 0.0) -> StepResult:
    mine = [np.array(pack) for pack in packs]
    orders = [PackOrder(m, weigh=tuple(mine) if n == 0 else ()) for n, m in enumerate(mine)]
    with packs_ahead(run.reader, orders) as ready:
        return run_step(
            run.computation,
            run.optimizer,
            step=1,
            mine=mine,
            packs=ready,
            reader=run.reader,
            ranks=ALONE,
            learning_rate=0.01,
            clip_norm=clip_norm,
        )


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in run.optimizer.model_tensors().items()}


def same(before: dict[str, torch.Tensor], run: Run) -> bool:
    return all(torch.equal(t, before[n]) for n, t in run.optimizer.model_tensors().items())


@pytest.fixture
def uneven(ask, sample):
    """B24: samples with 1, 2, 4, 8 and 16 supervised tokens, and one with 50 unsupervised rows."""
    return ask([*(sample(8 + n, supervised(n)) for n in (1, 2, 4, 8, 16)), sample(50, ())])


@pytest.mark.parametrize(
    "packs",
    [
        [[0], [1], [2], [3], [4]],
        [[0, 1, 2, 3], [4]],
        [[4, 2], [0, 3, 1]],
        [[0, 1, 5], [2, 3, 4]],
    ],
)
def test_the_gradient_does_not_depend_on_the_slices(uneven, packs):
    whole, sliced = begin(uneven), begin(uneven)
    one, many = step(whole, [[0, 1, 2, 3, 4]]), step(sliced, packs)
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert many.weight == pytest.approx(one.weight)
    scale = float(whole.optimizer.gradient.abs().max())
    assert torch.allclose(
        sliced.optimizer.gradient, whole.optimizer.gradient, rtol=1e-4, atol=1e-5 * scale
    )


def test_the_loss_is_the_weighted_mean_by_hand(uneven):
    run = begin(uneven)
    result = step(run, [[0, 1, 2, 3, 4]])
    by_step, counts = result.metrics.loss.tolist(), result.metrics.count.tolist()
    assert counts == [31.0, 31.0, 31.0]  # labels lie at 4 and later: no row is lost at step 2
    assert result.weight == pytest.approx(31 * (1 + 0.8 + 0.64))
    weighted = sum(0.8**k * loss for k, loss in enumerate(by_step))
    assert result.loss == pytest.approx(weighted / result.weight)


def test_a_pack_without_supervised_tokens_changes_nothing_else(uneven):
    without, with_it = begin(uneven), begin(uneven)
    step(without, [[0, 1]])
    step(with_it, [[0, 1], [5]])
    assert torch.equal(without.optimizer.gradient, with_it.optimizer.gradient)
    assert same(weights(without), with_it)


def test_a_step_without_supervised_tokens_leaves_the_weights(uneven):
    run = begin(uneven)
    step(run, [[0, 1]])  # now there is momentum that could move them
    before = weights(run)
    result = step(run, [[5]])
    assert (result.loss, result.weight, result.updated) == (0.0, 0.0, False)
    assert same(before, run)


def test_the_norm_is_that_before_clipping(uneven):
    clipped, free = begin(uneven), begin(uneven)
    assert (
        step(clipped, [[0, 1, 2]], clip_norm=1e-3).gradient_norm
        == step(free, [[0, 1, 2]]).gradient_norm
    )
    assert clipped.optimizer.norm() == pytest.approx(1e-3, rel=1e-4)


def test_a_loss_that_is_not_finite_names_the_pack_and_leaves_the_weights(ask, sample):
    run = begin(ask([sample(12, supervised(5)), sample(12, supervised(5), poison=True)]))
    before = weights(run)
    with pytest.raises(NonFinite, match=r"step 1: loss nan in the pack of samples c-1;"):
        step(run, [[0], [1]])
    assert same(before, run)


def test_a_gradient_that_is_not_finite_names_the_pack_and_leaves_the_weights(ask, sample):
    run = begin(ask([sample(12, supervised(5)), sample(12, supervised(5))]))
    before = weights(run)

    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    class Overflowing(type(run.computation)):
        def loss(self, pack):
            result = super().loss(pack)
            if pack.ids.tolist() != run.reader.read(np.array([1])).ids.tolist():
                return result
            return replace(result, loss=Overflow.apply(result.loss))

    poisoned = Overflowing(**vars(run.computation))
    with pytest.raises(NonFinite, match=r"step 1: gradient norm nan in the pack of samples c-1;"):
        step(replace(run, computation=poisoned), [[0], [1]])
    assert same(before, run)


def test_few_steps_lower_the_loss_in_both_dtypes(uneven):
    for dtype in ("float32", "bfloat16"):
        run = begin(replace(uneven, compute_dtype=dtype))
        losses = [step(run, [[0, 1, 2], [3, 4]], clip_norm=1.0).loss for _ in range(8)]
        assert losses[-1] < 0.9 * losses[0]
