import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pipeline.draft.ttt import pack_weight
from pipeline.store.reader import StateDataset
from pipeline.training.batches import PackOrder, PackReader, packs_ahead
from pipeline.training.errors import TrainingError


def reader(ask, **changes) -> PackReader:
    values = {"dtype": torch.float32, "vocabulary_size": 48, "steps": 3, "decay": 0.5, **changes}
    return PackReader(StateDataset.open(ask().dataset), **values)


def orders(count: int, seen: list[int] | None = None) -> Iterator[PackOrder]:
    for number in range(count):
        if seen is not None:
            seen.append(number)
        yield PackOrder(np.array([number % 4]))


def test_a_pack_holds_its_samples_end_to_end(ask):
    dataset = StateDataset.open(ask().dataset)
    pack = reader(ask).read(np.array([3, 0]))
    first, second = dataset.read(dataset.entries[3]), dataset.read(dataset.entries[0])
    assert pack.ids.tolist() == [*first.input_ids.tolist(), *second.input_ids.tolist()]
    assert pack.supervised.tolist() == [*first.supervised.tolist(), *second.supervised.tolist()]
    assert torch.equal(pack.taps[15:, 16:32], second.taps[1].float())
    assert torch.equal(pack.final[:15], first.final.float())
    assert pack.document.tolist() == [0] * 15 + [1] * 12
    assert pack.position.tolist() == [*range(15), *range(12)]


def test_the_weight_of_a_step_is_that_of_its_packs(ask):
    made = reader(ask)
    both = (np.array([0, 1]), np.array([2]))
    ready = made.make(PackOrder(both[0], weigh=both))
    packs = [made.read(samples) for samples in both]
    wanted = sum(pack_weight(p.supervised, p.document, steps=3, decay=0.5) for p in packs)
    assert ready.step_weight == pytest.approx(wanted)
    assert wanted > 0


def test_ids_outside_the_vocabulary_name_the_sample(ask):
    with pytest.raises(TrainingError, match="c-2"):
        reader(ask, vocabulary_size=5).read(np.array([2]))


def test_packs_come_in_order(ask):
    with packs_ahead(reader(ask), orders(6)) as packs:
        assert [ready.samples.tolist() for ready in packs] == [[0], [1], [2], [3], [0], [1]]


def test_few_packs_wait_however_slow_the_loop_is(ask):
    seen: list[int] = []
    with packs_ahead(reader(ask), orders(50, seen)) as packs:
        next(packs)
        time.sleep(0.5)
        assert len(seen) <= 4  # one taken, two waiting, one in the thread's hand


def test_leaving_early_ends_the_thread(ask):
    with packs_ahead(reader(ask), orders(50)) as packs:
        next(packs)
    assert not [t for t in threading.enumerate() if t.name == "packs-ahead"]


def test_an_error_of_the_thread_is_raised_where_the_pack_is_taken(ask):
    wrong = [PackOrder(np.array([0])), PackOrder(np.array([99]))]
    with packs_ahead(reader(ask), wrong) as packs:
        next(packs)
        with pytest.raises(IndexError):
            next(packs)
