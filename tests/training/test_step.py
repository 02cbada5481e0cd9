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


def step(
    run: Run, packs: list[list[int]], *, clip_norm: float = 0.0, ranks: Ranks = ALONE
) -> StepResult:
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
            ranks=ranks,
            learning_rate=0.01,
            clip_norm=clip_norm,
        )


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in run.optimizer.gather()[0].items()}


def same(before: dict[str, torch.Tensor], run: Run) -> bool:
    return all(torch.equal(t, before[n]) for n, t in run.optimizer.gather()[0].items())


def gradient(run: Run) -> torch.Tensor:
    return torch.cat([t.flatten() for t in vars(run.optimizer.gradients).values()])


@pytest.fixture
def uneven(ask, sample):
    """B24: samples with 1, 2, 4, 8 and 16 supervised tokens, and one with 50 unsupervised rows."""
    return ask([*(sample(8 + n, supervised(n)) for n in (1, 2, 4, 8, 16)), sample(50, ())])


@pytest.mark.parametrize(
    "packs",
    [
        [[5], [0, 1, 2, 3, 4]],
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
    scale = float(gradient(whole).abs().max())
    assert scale > 0
    assert torch.allclose(gradient(sliced), gradient(whole), rtol=1e-4, atol=1e-5 * scale)


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
    assert torch.equal(gradient(without), gradient(with_it))
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
    norm = step(free, [[0, 1, 2]]).gradient_norm
    assert step(clipped, [[0, 1, 2]], clip_norm=1e-9).gradient_norm == norm
    assert norm == pytest.approx(float(gradient(free).norm()), rel=1e-5)
    assert not same(weights(free), clipped)


def test_sums_start_once_all_ranks_are_in_the_last_backward(uneven):
    run, told = begin(uneven), []

    class NotingOptimizer(type(run.optimizer)):
        def reduce(self, bucket):
            told.append(bucket)

        def step(self, *rest, **named):
            told.append("step")
            return super().step(*rest, **named)

    class NotingRanks(Ranks):
        def agree(self, problem):
            told.append("agree")

    run.optimizer.__class__ = NotingOptimizer
    step(run, [[0, 1], [5], [2, 3]], ranks=NotingRanks(0, 1, torch.device("cpu")))
    order = ["head", "down", "gate_up", "o", "qkv", "fc", "norms"]
    # What the step asks for again, in case there was no backward, is a duplicate.
    assert told == ["agree", *order, "agree", "step", *order]


def test_the_gradient_is_that_of_the_mean(uneven):
    once, twice = begin(uneven), begin(uneven)
    one, two = step(once, [[3]]), step(twice, [[3], [3]])
    assert two.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-5)
    assert two.loss == pytest.approx(one.loss, rel=1e-5)


def test_nothing_of_an_earlier_gradient_is_left(uneven):
    clean, used = begin(uneven), begin(uneven)
    for tensor in vars(used.optimizer.gradients).values():
        tensor.fill_(float("nan"))
    step(clean, [[5], [0, 1]])
    step(used, [[5], [0, 1]])
    assert torch.equal(gradient(used), gradient(clean))


def test_a_rank_without_packs_gives_no_gradient(uneven):
    run = begin(uneven)
    step(run, [[0, 1]])
    assert gradient(run).any()
    step(run, [])
    assert not gradient(run).any()


def test_a_loss_that_is_not_finite_names_the_pack_and_leaves_the_weights(ask, sample):
    run = begin(ask([sample(12, supervised(5)), sample(12, supervised(5), poison=True)]))
    before = weights(run)
    with pytest.raises(NonFinite, match=r"step 1: loss nan in the pack of samples c-1;"):
        step(run, [[0], [1]])
    assert same(before, run)
    assert run.optimizer.updates == 0


def test_a_gradient_that_is_not_finite_names_the_pack_and_leaves_the_weights(ask, sample):
    run = begin(ask([sample(12, supervised(5)), sample(12, supervised(5))]))
    before = weights(run)

    class Overflowing(type(run.computation)):
        def loss(self, pack, *, gradients=None, **rest):
            result = super().loss(pack, gradients=gradients, **rest)
            if pack.ids.tolist() == run.reader.read(np.array([1])).ids.tolist():
                gradients.o[0, 0] = float("inf")
            return result

    poisoned = Overflowing(**vars(run.computation))
    with pytest.raises(NonFinite, match=r"step 1: gradient norm inf in the pack of samples c-1;"):
        step(replace(run, computation=poisoned), [[0], [1]])
    assert same(before, run)


def test_few_steps_lower_the_loss_in_both_dtypes(uneven):
    for dtype in ("float32", "bfloat16"):
        run = begin(replace(uneven, compute_dtype=dtype))
        losses = [step(run, [[0, 1, 2], [3, 4]], clip_norm=1.0).loss for _ in range(8)]
        assert losses[-1] < 0.9 * losses[0]
