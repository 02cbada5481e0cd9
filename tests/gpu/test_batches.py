"""Packs on a GPU are those on a CPU, whatever its stream is busy with."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.draft.ttt import Pack
from pipeline.store.layout import state_fields
from pipeline.store.reader import DatasetFacts, StateDataset
from pipeline.store.writer import PlannedSample, ShardBuilder
from pipeline.training import staging
from pipeline.training.batches import PackOrder, PackReader, packs_ahead

pytestmark = pytest.mark.gpu

WIDTH, SAMPLES, VOCABULARY = 720, 24, 500
GPU = torch.device("cuda", 0)
LOTS = [np.array([n % SAMPLES, (n * 7 + 3) % SAMPLES]) for n in range(30)]


@pytest.fixture
def dataset(tmp_path: Path) -> StateDataset:
    """24 samples of 200 to 430 rows; islands of supervised tokens."""
    fields = state_fields(WIDTH, taps=3)
    plan = [PlannedSample(f"s-{n}", 200 + 10 * n, "train") for n in range(SAMPLES)]
    builder = ShardBuilder(tmp_path, "states-00000", fields=fields, plan=plan)
    draw = torch.Generator().manual_seed(0)
    for sample in plan:
        n = sample.length
        rows = {
            field.name: torch.randn(n, WIDTH, generator=draw).bfloat16()
            for field in fields
            if field.width
        }
        rows["input_ids"] = torch.randint(0, VOCABULARY, (n,), generator=draw, dtype=torch.int32)
        rows["supervised"] = torch.arange(n) % 50 > 30
        builder.place(sample.id, rows)
    builder.finish()
    DatasetFacts(WIDTH, (1, 2, 3), "f" * 64, 1).write(tmp_path)
    return StateDataset.open(tmp_path)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several fillings of every buffer a pack."""
    monkeypatch.setattr(staging, "PIECE_BYTES", 40_000)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 300_000)


def reader(dataset: StateDataset, device: torch.device, *, direct: bool = False) -> PackReader:
    return PackReader(
        dataset,
        dtype=torch.bfloat16,
        vocabulary_size=VOCABULARY,
        steps=5,
        decay=0.8,
        device=device,
        direct=direct,
    )


def assert_same(found: Pack, wanted: Pack) -> None:
    assert found.taps.device == found.ids.device == found.plan.keys.device == GPU
    for name in ("ids", "taps", "final"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name
    for name in ("keys", "teachers", "label", "key_sources"):
        assert torch.equal(getattr(found.plan, name).cpu(), getattr(wanted.plan, name)), name


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.usefixtures("small_buffers")
def test_a_pack_is_the_cpus(dataset: StateDataset, direct: bool) -> None:
    here = reader(dataset, torch.device("cpu"))
    there = reader(dataset, GPU, direct=direct)
    with packs_ahead(there, map(PackOrder, LOTS)) as packs:
        for samples, ready in zip(LOTS, packs, strict=True):
            assert_same(ready.pack, here.read(samples))


@pytest.mark.usefixtures("small_buffers")
def test_memory_of_a_pack_is_kept_until_the_stream_has_used_it(dataset: StateDataset) -> None:
    """The host is far ahead of the stream: each pack is let go before the GPU has looked at it."""
    here = reader(dataset, torch.device("cpu"))
    sums = []
    with packs_ahead(reader(dataset, GPU), map(PackOrder, LOTS)) as packs:
        for ready in packs:
            torch.cuda._sleep(20_000_000)
            pack = ready.pack
            sums.append(
                torch.stack(
                    [
                        pack.taps.double().sum(),
                        pack.final.double().sum(),
                        pack.plan.keys.double().sum(),
                        pack.ids.double().sum(),
                    ]
                )
            )
            del ready, pack
    for samples, found in zip(LOTS, sums, strict=True):
        pack = here.read(samples)
        wanted = [pack.taps, pack.final, pack.plan.keys, pack.ids]
        assert found.tolist() == pytest.approx([float(t.double().sum()) for t in wanted])


def test_waiting_is_the_streams_and_not_the_hosts(dataset: StateDataset) -> None:
    def flow(*, busy: bool, slow: bool):
        made = reader(dataset, GPU)
        read = made._files.read

        def slowly(*rows) -> None:
            if slow:
                time.sleep(0.03)
            read(*rows)

        made._files.read = slowly
        with packs_ahead(made, map(PackOrder, LOTS)) as packs:
            for _ in packs:
                if busy:
                    torch.cuda._sleep(400_000_000)  # 0.2 s: the host waits, the GPU does not
            torch.cuda.synchronize()
            return packs.flow()

    assert flow(busy=True, slow=True).waiting < 0.02
    assert flow(busy=False, slow=True).waiting > 0.5
