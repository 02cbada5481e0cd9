import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.errors import NothingToTrain
from pipeline.training.packs import Packing, Plan, pack_in_order

lengths_of_samples = st.lists(st.integers(1, 30), min_size=1, max_size=60)


def packing(lengths: list[int], *, tokens: int, per_step: int = 2) -> Packing:
    array = np.array(lengths, dtype=np.int64)
    return pack_in_order(
        np.arange(len(array)), array, tokens_per_pack=tokens, packs_per_step=per_step
    )


def plan(lengths: list[int], *, epochs: int = 2, seed: int = 5, tokens: int = 40) -> Plan:
    array = np.array(lengths, dtype=np.int64)
    return Plan(
        samples=np.arange(len(array)),
        lengths=array,
        tokens_per_pack=tokens,
        packs_per_step=2,
        epochs=epochs,
        seed=seed,
    )


def test_packs_by_hand():
    found = packing([3, 4, 3, 12, 1, 9, 10], tokens=10)
    packs = [found.samples(pack).tolist() for pack in range(found.packs)]
    assert packs == [[0, 1, 2], [3], [4, 5], [6]]
    assert found.steps == 2


@given(lengths=lengths_of_samples, per_step=st.integers(1, 5))
def test_every_sample_lies_in_exactly_one_pack_of_the_budget(lengths: list[int], per_step: int):
    found = packing(lengths, tokens=25, per_step=per_step)
    packs = [pack for step in range(found.steps) for pack in found.step_packs(step)]
    assert np.concatenate(packs).tolist() == list(range(len(lengths)))
    assert found.steps == -(-len(packs) // per_step)
    for pack in packs:
        assert len(pack) == 1 or sum(lengths[i] for i in pack) <= 25


@given(lengths=lengths_of_samples, world=st.integers(1, 4))
def test_ranks_share_out_a_step_without_loss(lengths: list[int], world: int):
    found = packing(lengths, tokens=25, per_step=3)
    for step in range(found.steps):
        dealt = [found.step_packs(step, rank=rank, world=world) for rank in range(world)]
        together = sorted(tuple(pack) for packs in dealt for pack in packs)
        assert together == sorted(tuple(pack) for pack in found.step_packs(step))


def test_epochs_differ_and_the_same_seed_repeats_them():
    lengths = list(range(1, 30))
    first, second = plan(lengths).epoch(0).order, plan(lengths).epoch(1).order
    assert first.tolist() != second.tolist()
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert first.tolist() == plan(lengths).epoch(0).order.tolist()
    assert first.tolist() != plan(lengths, seed=6).epoch(0).order.tolist()


@given(lengths=lengths_of_samples, data=st.data())
def test_a_plan_taken_up_again_is_the_tail_of_the_whole(lengths: list[int], data: st.DataObject):
    whole = [(e, s) for e, s, _ in plan(lengths, epochs=3).from_step(0)]
    done = data.draw(st.integers(0, len(whole)))
    assert [(e, s) for e, s, _ in plan(lengths, epochs=3).from_step(done)] == whole[done:]


def test_a_plan_without_samples_is_refused():
    with pytest.raises(NothingToTrain, match="supervised"):
        plan([])


def test_three_hundred_thousand_samples_are_planned_in_seconds():
    lengths = np.random.default_rng(0).integers(20, 600, 300_000).tolist()
    large = plan(lengths, epochs=5, tokens=8192)
    start = time.perf_counter()
    large.steps_per_epoch()
    assert time.perf_counter() - start < 10
