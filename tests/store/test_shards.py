import errno
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from pipeline.slate.reread import digest_once
from pipeline.store.check import check_states
from pipeline.store.errors import ShardDamaged, StoreError
from pipeline.store.index import ShardIndex
from pipeline.store.layout import SAMPLE_FIELDS, ShardLayout, state_fields
from pipeline.store.reader import DatasetFacts, PreparedSamples, StateDataset
from pipeline.store.writer import PlannedSample, SampleWriter, ShardBuilder, to_sample

HIDDEN = 8
FIELDS = state_fields(HIDDEN, taps=3)


def state_rows(length: int, *, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = {
        field.name: torch.randn(length, HIDDEN, generator=generator).to(torch.bfloat16)
        for field in FIELDS
        if field.width
    }
    rows["input_ids"] = torch.randint(0, 99, (length,), generator=generator, dtype=torch.int32)
    rows["supervised"] = torch.arange(length) % 2 == 1
    return rows


def build(folder: Path, lengths: dict[str, int], *, order: list[str], skip: set[str]) -> ShardIndex:
    plan = [PlannedSample(name, length, "train") for name, length in lengths.items()]
    builder = ShardBuilder(folder, "states-00000", fields=FIELDS, plan=plan)
    for name in order:
        if name in skip:
            builder.skip(name, "refused")
        else:
            builder.place(name, state_rows(lengths[name], seed=int(name)))
    index = builder.finish()
    DatasetFacts(HIDDEN, (1, 2, 3), "f" * 64, 1).write(folder)
    return index


def test_a_shard_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    build(tmp_path, {"1": 3, "2": 4}, order=["2", "1"], skip=set())
    with safe_open(tmp_path / "states-00000.safetensors", framework="pt") as file:
        assert set(file.keys()) == {field.name for field in FIELDS}
        expected = torch.cat([state_rows(3, seed=1)["tap_1"], state_rows(4, seed=2)["tap_1"]])
        assert torch.equal(file.get_tensor("tap_1"), expected)
        assert file.get_tensor("supervised").tolist() == [False, True, False] + [False, True] * 2


@settings(max_examples=40)
@given(data=st.data())
def test_what_was_placed_is_read_back_in_planned_order(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    count = data.draw(st.integers(1, 6))
    names = [str(number) for number in range(count)]
    lengths = {name: data.draw(st.integers(1, 5)) for name in names}
    order = data.draw(st.permutations(names))
    skip = set(data.draw(st.lists(st.sampled_from(names), unique=True, max_size=count - 1)))
    build(folder, lengths, order=order, skip=skip)
    dataset = StateDataset.open(folder)
    assert [entry.id for entry in dataset.entries] == [n for n in names if n not in skip]
    assert {name for name, _ in dataset.skipped} == skip
    for entry in dataset.entries:
        states, wanted = dataset.read(entry), state_rows(lengths[entry.id], seed=int(entry.id))
        assert torch.equal(states.input_ids, wanted["input_ids"])
        assert torch.equal(states.supervised, wanted["supervised"])
        assert all(torch.equal(states.taps[i], wanted[f"tap_{i}"]) for i in range(3))
        assert torch.equal(states.final, wanted["final"])
    assert sum(check_states(folder, threads=2)) == sum(entry.length for entry in dataset.entries)


def test_the_file_does_not_depend_on_the_order_of_arrival(tmp_path: Path) -> None:
    digests = set()
    for number, order in enumerate((["1", "2", "3"], ["3", "1", "2"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        digests.add(build(folder, {"1": 3, "2": 4, "3": 2}, order=order, skip={"2"}).sha256)
    assert len(digests) == 1


@settings(max_examples=60)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(
    position: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    build(folder, {"1": 3, "2": 4}, order=["1", "2"], skip=set())
    path = folder / "states-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(ShardDamaged):
        list(check_states(folder, threads=1))


def test_swapped_rows_are_named_with_their_sample(tmp_path: Path) -> None:
    build(tmp_path, {"1": 3, "2": 4}, order=["1", "2"], skip=set())
    path = tmp_path / "states-00000.safetensors"
    data = bytearray(path.read_bytes())
    start = ShardLayout(FIELDS, 7).offsets()["tap_1"] + 3 * 2 * HIDDEN  # sample 2, rows 0 and 1
    one, two = slice(start, start + 16), slice(start + 16, start + 32)
    data[one], data[two] = data[two], data[one]
    path.write_bytes(data)
    with pytest.raises(ShardDamaged, match="2: its rows are not those of its digest"):
        list(check_states(tmp_path, threads=1))


def test_an_index_that_tells_of_other_rows_than_the_shard_has_is_noticed(tmp_path: Path) -> None:
    index = build(tmp_path, {"1": 4, "2": 4, "3": 4}, order=["1", "2", "3"], skip=set())
    one, two, three = index.entries
    entries = (one, replace(two, digest=three.digest), replace(three, digest=two.digest))
    replace(index, entries=entries).write(tmp_path / "states-00000.json")
    with pytest.raises(ShardDamaged, match=r"2: its rows are not those .*; 3: its rows are not"):
        list(check_states(tmp_path, threads=1))


def test_an_index_of_another_file_digest_is_noticed(tmp_path: Path) -> None:
    index = build(tmp_path, {"1": 4}, order=["1"], skip=set())
    replace(index, sha256="0" * 64).write(tmp_path / "states-00000.json")
    with pytest.raises(ShardDamaged, match="its bytes are not those of its index"):
        list(check_states(tmp_path, threads=1))


@pytest.mark.parametrize("large", [True, False], ids=["past-the-cache", "through-it"])
def test_more_than_memory_keeps_is_proven_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    build(tmp_path, {"1": 4}, order=["1"], skip=set())
    seen = []

    def told(path: Path, **how: Any) -> str:
        seen.append(how["direct"])
        return digest_once(path, **how)

    monkeypatch.setattr("pipeline.store.check.past_the_cache", lambda _bytes: large)
    monkeypatch.setattr("pipeline.store.check.digest_once", told)
    assert list(check_states(tmp_path, threads=1)) == [4]
    assert seen == [large]


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5))
def test_rows_are_proven_wherever_a_piece_of_the_file_ends(
    lengths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    named = {str(number): length for number, length in enumerate(lengths)}
    build(folder, named, order=list(named), skip=set())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.slate.reread.PIECE_BYTES", 4096)
        assert list(check_states(folder, threads=1)) == [sum(lengths)]


@pytest.mark.parametrize("again", [True, False], ids=["block", "once"])
def test_a_block_that_cannot_be_read_is_an_error_of_the_shard_and_not_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    build(tmp_path, {"1": 3, "2": 4}, order=["1", "2"], skip=set())

    def broken(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    whole = os.pread
    bad = ShardLayout(FIELDS, 7).offsets()["tap_1"] + 3 * 2 * HIDDEN

    def reads(file: int, size: int, at: int) -> bytes:
        return broken() if again and at <= bad < at + size else whole(file, size, at)

    monkeypatch.setattr(os, "pread", reads)
    says = "2 tap_1 rows 0 to 3: cannot be read" if again else "safetensors: cannot be read"
    with pytest.raises(ShardDamaged, match=says + ": Input/output error"):
        list(check_states(tmp_path, threads=1))


def test_a_deleted_row_is_named(tmp_path: Path) -> None:
    build(tmp_path, {"1": 3, "2": 4}, order=["1", "2"], skip=set())
    path = tmp_path / "states-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: -2 * HIDDEN])
    dataset = StateDataset.open(tmp_path)
    with pytest.raises(ShardDamaged, match=r"states-00000.safetensors: \d+ bytes"):
        dataset.read(dataset.entries[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.pop("final"), "exactly the shard's fields"),
        (lambda rows: rows.update(final=rows["final"][:2]), "final"),
        (lambda rows: rows.update(final=rows["final"].float()), "float32"),
    ],
)
def test_rows_of_the_wrong_shape_are_refused(tmp_path: Path, change, message: str) -> None:
    plan = [PlannedSample("1", 3, "train")]
    builder = ShardBuilder(tmp_path, "states-00000", fields=FIELDS, plan=plan)
    rows = state_rows(3, seed=1)
    change(rows)
    with pytest.raises(StoreError, match=message):
        builder.place("1", rows)
    builder.abandon()
    assert list(tmp_path.iterdir()) == []


def test_an_undecided_or_repeated_sample_stops_the_shard(tmp_path: Path) -> None:
    plan = [PlannedSample("1", 3, "train"), PlannedSample("2", 3, "train")]
    builder = ShardBuilder(tmp_path, "states-00000", fields=FIELDS, plan=plan)
    builder.place("1", state_rows(3, seed=1))
    with pytest.raises(StoreError, match="undecided"):
        builder.finish()
    with pytest.raises(StoreError, match="decided twice"):
        builder.skip("1", "again")
    builder.abandon()


def test_a_full_disk_leaves_no_shard(tmp_path: Path) -> None:
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
from pathlib import Path
from pipeline.store.layout import state_fields
from pipeline.store.writer import PlannedSample, ShardBuilder
ShardBuilder(Path({str(tmp_path)!r}), "states-00000", fields=state_fields(8, taps=3),
             plan=[PlannedSample("1", 300, "train")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_samples_keep_their_order_over_several_shards(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, shard_tokens=5)
    for number in range(7):
        split = "held_out" if number == 3 else "train"
        ids = [number] * (number + 1)
        writer.add(to_sample(f"s{number}", ids, supervised=[True] * len(ids), split=split))
    writer.flush()
    samples = PreparedSamples.open(tmp_path)
    assert [entry.id for entry in samples.entries] == [f"s{number}" for number in range(7)]
    assert samples.entries[3].split == "held_out"
    assert samples.read(samples.entries[6]).input_ids.tolist() == [6] * 7
    assert len({entry.shard for entry in samples.entries}) > 1


def test_a_sample_in_two_shards_is_refused(tmp_path: Path) -> None:
    sample = to_sample("same", [1, 2], supervised=[True, True], split="train")
    writer = SampleWriter(tmp_path, shard_tokens=1)
    writer.add(sample)
    writer.add(sample)
    with pytest.raises(ShardDamaged, match="two places"):
        PreparedSamples.open(tmp_path)


def test_an_index_with_a_hole_is_refused(tmp_path: Path) -> None:
    build(tmp_path, {"1": 3, "2": 4}, order=["1", "2"], skip=set())
    path = tmp_path / "states-00000.json"
    path.write_text(path.read_text().replace('"offset": 3', '"offset": 4'))
    with pytest.raises(ShardDamaged, match="sample 2 does not follow"):
        StateDataset.open(tmp_path)


def test_states_under_another_convention_are_refused(tmp_path: Path) -> None:
    build(tmp_path, {"1": 3}, order=["1"], skip=set())
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace("after the final norm", "before the final norm"))
    with pytest.raises(StoreError, match="before the final norm"):
        StateDataset.open(tmp_path)


def test_reading_maps_the_file_instead_of_loading_it(tmp_path: Path) -> None:
    plan = [PlannedSample("1", 200_000, "train")]
    builder = ShardBuilder(tmp_path, "samples-00000", fields=SAMPLE_FIELDS, plan=plan)
    ids = torch.zeros(200_000, dtype=torch.int32)
    builder.place("1", {"input_ids": ids, "supervised": ids.bool()})
    builder.finish()
    samples = PreparedSamples.open(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    samples.read(samples.entries[0])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200_000 * 5 // os.sysconf(
        "SC_PAGE_SIZE"
    )
