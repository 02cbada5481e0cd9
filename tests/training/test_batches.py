import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.draft.chain import chain_weight
from pipeline.draft.ttt import Pack
from pipeline.store.errors import ShardDamaged
from pipeline.store.reader import StateDataset
from pipeline.training import staging
from pipeline.training.batches import PackOrder, PackReader, PacksAhead, packs_ahead
from pipeline.training.errors import TrainingError

STEPS, DECAY = 3, 0.5
READING = ("packs-ahead", "packs-plan", "packs-read")


def reader(ask, given=None, **changes) -> PackReader:
    values = {"dtype": torch.float32, "vocabulary_size": 48, "steps": STEPS, "decay": DECAY}
    dataset = StateDataset.open(ask(given).dataset)
    return PackReader(dataset, **{**values, "device": torch.device("cpu"), **changes})


def orders(count: int, seen: list[int] | None = None) -> Iterator[PackOrder]:
    for number in range(count):
        if seen is not None:
            seen.append(number)
        yield PackOrder(np.array([number % 4]))


def whole(ask, samples: list[int], given=None) -> tuple[Pack, Tensor, Tensor]:
    """The pack of whole samples, its masks and documents, as the map shows them."""
    dataset = StateDataset.open(ask(given).dataset)
    states = [dataset.read(dataset.entries[n]) for n in samples]
    mask = torch.cat([s.supervised for s in states])
    document = torch.cat([torch.full((len(s.final),), n) for n, s in enumerate(states)])
    pack = Pack.of(
        ids=torch.cat([s.input_ids for s in states]).long(),
        taps=torch.cat([torch.cat(s.taps, 1) for s in states]).float(),
        final=torch.cat([s.final for s in states]).float(),
        supervised=mask,
        document=document,
        steps=STEPS,
        decay=DECAY,
    )
    return pack, mask, document


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if dataclasses.is_dataclass(one):
        names = [f.name for f in dataclasses.fields(one) if f.name != "_flat"]
        return all(same(getattr(one, n), getattr(other, n)) for n in names)
    return np.array_equal(one, other)


@pytest.fixture
def masks(sample) -> list:
    """All, none, islands, one token, both ends, the usual second half."""
    return [
        sample(15, tuple(range(15))),
        sample(9, ()),
        sample(40, (3, 4, 9, 20, 21, 22, 38)),
        sample(12, (7,)),
        sample(13, (0, 12)),
        sample(20, tuple(range(10, 20))),
    ]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("samples", [[0], [1], [5, 2, 0], [1, 4, 3], [3, 1, 5, 4, 2, 0]], ids=str)
def test_a_pack_is_that_of_its_whole_samples(ask, masks, samples, direct) -> None:
    found = reader(ask, masks, direct=direct).read(np.array(samples))
    assert same(found, whole(ask, samples, masks)[0])


@pytest.mark.parametrize("direct", [False, True])
def test_packs_larger_than_the_buffers_come_whole(ask, masks, direct, monkeypatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 100)  # three rows of 32 bytes
    monkeypatch.setattr(staging, "CHUNK_BYTES", 700)
    made = reader(ask, masks, direct=direct)
    lots = [[5, 2, 0], [1], [2, 2, 3], [0, 4, 5, 1]] * 3
    with packs_ahead(made, [PackOrder(np.array(samples)) for samples in lots]) as packs:
        for samples in lots:
            ready = next(packs)
            assert ready.samples.tolist() == samples
            states = 3 * len(ready.pack.plan.keys) + len(ready.pack.plan.teachers)
            assert ready.size >= 32 * states
            assert direct or ready.size == 32 * states
            assert same(ready.pack, whole(ask, samples, masks)[0])


def test_only_rows_that_the_loss_reads_are_read(ask, masks) -> None:
    samples = [2, 1, 5]
    ready = reader(ask, masks).make(PackOrder(np.array(samples)))
    plan = ready.pack.plan
    assert ready.size == 2 * 16 * (3 * len(plan.keys) + len(plan.teachers))
    assert len(plan.keys) < 40 + 9 + 20
    assert len(plan.teachers) < len(plan.keys) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_in_the_compute_dtype(ask, dtype) -> None:
    pack = reader(ask, dtype=dtype).read(np.array([0]))
    assert (pack.taps.dtype, pack.final.dtype, pack.ids.dtype) == (dtype, dtype, torch.int64)


def test_memory_is_that_of_a_few_buffers(ask, masks, monkeypatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 100)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 700)
    made, allocate = [], staging.Buffer.__init__

    def counted(self, **sizes) -> None:
        made.append(sizes["room"])
        allocate(self, **sizes)

    monkeypatch.setattr(staging.Buffer, "__init__", counted)
    with packs_ahead(reader(ask, masks), [PackOrder(np.array([0, 2, 5]))] * 9) as packs:
        assert len(list(packs)) == 9
    assert len(made) == 4


def test_the_weight_of_a_step_is_that_of_its_packs(ask) -> None:
    made = reader(ask)
    both = (np.array([0, 1]), np.array([2]))
    ready = made.make(PackOrder(both[0], weigh=both))
    wanted = 0.0
    for samples in both:
        pack, mask, document = whole(ask, samples.tolist())
        wanted += chain_weight(mask, document, steps=STEPS, decay=DECAY)
        assert made.read(samples).plan.weight == pytest.approx(pack.plan.weight)
    assert ready.step_weight == pytest.approx(wanted)
    assert wanted > 0
    assert made.make(PackOrder(both[0])).step_weight is None


def test_ids_outside_the_vocabulary_name_the_sample(ask) -> None:
    with pytest.raises(TrainingError, match="c-2"):
        reader(ask, vocabulary_size=5).read(np.array([2]))


def test_packs_come_in_order(ask) -> None:
    with packs_ahead(reader(ask), orders(6)) as packs:
        assert [ready.samples.tolist() for ready in packs] == [[0], [1], [2], [3], [0], [1]]


def test_few_packs_wait_however_slow_the_loop_is(ask) -> None:
    seen: list[int] = []
    with packs_ahead(reader(ask), orders(50, seen)) as packs:
        next(packs)
        time.sleep(0.5)
        assert len(seen) <= 9  # taken, waiting, in the thread's hand, four buffers', two planned


def reading() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(READING)]


def test_leaving_early_ends_the_threads_at_once(ask) -> None:
    with packs_ahead(reader(ask), orders(50)) as packs:
        next(packs)
        time.sleep(0.2)  # the thread waits for room by now
        assert reading()
        began = time.perf_counter()
    assert time.perf_counter() - began < 5  # else it would wait for ever
    assert not reading()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_leaving_hangs_at_no_moment(ask, count) -> None:
    made = reader(ask)
    for taken in range(10):
        packs = PacksAhead(made, orders(count))
        for _ in range(min(taken % 3, count)):
            next(packs)
        leaving = threading.Thread(target=packs.close, daemon=True)
        leaving.start()
        leaving.join(5)
        assert not leaving.is_alive()


def test_leaving_within_a_large_pack_reads_no_more_of_it(ask, masks, monkeypatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 100)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 700)
    made = reader(ask, masks, threads=1)
    monkeypatch.setattr(made._files, "read", lambda *_: time.sleep(0.1))  # 220 reads a pack
    with packs_ahead(made, [PackOrder(np.array([0, 1, 2, 3, 4, 5] * 5))]):
        time.sleep(0.1)
        began = time.perf_counter()
    assert time.perf_counter() - began < 5


def test_two_streams_of_one_reader_do_not_wait_for_each_other(ask, masks) -> None:
    """An evaluation reads its packs while those of the next step wait."""
    made = reader(ask, masks)
    with packs_ahead(made, orders(20)) as packs:
        next(packs)
        with packs_ahead(made, orders(4)) as others:
            assert len(list(others)) == 4
        assert len(list(packs)) == 19


def test_an_error_of_the_thread_is_raised_where_the_pack_is_taken(ask) -> None:
    wrong = [PackOrder(np.array([0])), PackOrder(np.array([99]))]
    with packs_ahead(reader(ask), wrong) as packs:
        next(packs)
        with pytest.raises(IndexError):
            next(packs)
        assert list(packs) == []  # and does not hang


def test_a_shard_cut_meanwhile_stops_the_run_with_its_name(ask) -> None:
    made = reader(ask)
    made.read(np.array([0]))
    path = next(Path(ask().dataset).glob("*.safetensors"))
    os.truncate(path, 4096 + 40)
    with (
        packs_ahead(made, orders(3)) as packs,
        pytest.raises(ShardDamaged, match=r"states-00000.safetensors: .*sample c-0"),
    ):
        next(packs)


def test_a_loop_slower_than_the_disk_waits_for_nothing(ask) -> None:
    with packs_ahead(reader(ask), orders(12)) as packs:
        for _ in packs:
            time.sleep(0.2)  # of all of them two percent are far more than a ready pack takes
        flow = packs.flow()
    assert flow.line() is None
    assert flow.taken_bytes > 0
    assert flow.seconds >= 2.4


def test_a_disk_slower_than_the_loop_is_told_in_figures(ask, monkeypatch) -> None:
    made = reader(ask, threads=1)
    read = made._files.read

    def slowly(*rows) -> None:
        time.sleep(0.1)  # far more than what the loop does with a pack, on a busy machine too
        read(*rows)

    monkeypatch.setattr(made._files, "read", slowly)
    with packs_ahead(made, orders(12)) as packs:
        sizes = [ready.size for ready in packs]
        flow = packs.flow()
        assert packs.flow().taken_bytes == 0  # since last asked
    assert flow.taken_bytes == sum(sizes)
    assert flow.waiting > 0.9
    assert flow.reading > 0.9
    assert flow.wanted > 5 * flow.got
    assert "MB/s wanted" in str(flow.line())
