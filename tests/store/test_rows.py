import errno
import os
from pathlib import Path

import pytest
import torch

from pipeline.store import reader, rows
from pipeline.store.errors import ShardDamaged
from pipeline.store.layout import state_fields
from pipeline.store.reader import DatasetFacts, StateDataset
from pipeline.store.rows import DIRECT_ALIGNMENT, RowFiles
from pipeline.store.writer import PlannedSample, ShardBuilder

WIDTH = 96  # rows of 192 bytes: they begin and end anywhere within blocks of 4096
FIELDS = state_fields(WIDTH, taps=3)


@pytest.fixture
def dataset(tmp_path: Path) -> StateDataset:
    """Four shards of two samples, 50 and 41 rows."""
    for shard in range(4):
        plan = [PlannedSample(f"s-{shard}-{n}", rows, "train") for n, rows in enumerate((50, 41))]
        builder = ShardBuilder(tmp_path, f"states-{shard:05d}", fields=FIELDS, plan=plan)
        for sample in plan:
            draw = torch.Generator().manual_seed(shard)
            placed = {
                field.name: torch.randn(sample.length, WIDTH, generator=draw).bfloat16()
                for field in FIELDS
                if field.width
            }
            placed["input_ids"] = torch.arange(sample.length, dtype=torch.int32)
            placed["supervised"] = torch.arange(sample.length) % 3 == 0
            builder.place(sample.id, placed)
        builder.finish()
    DatasetFacts(WIDTH, (1, 2, 3), "f" * 64, 4).write(tmp_path)
    return StateDataset.open(tmp_path)


def aligned(size: int) -> memoryview:
    whole = torch.empty(size + DIRECT_ALIGNMENT, dtype=torch.uint8)
    first = -whole.data_ptr() % DIRECT_ALIGNMENT
    return memoryview(whole[first : first + size].numpy())


def read(files: RowFiles, dataset: StateDataset, number: int, first: int, count: int):
    """Rows of `final`, read as the trainer reads them."""
    where = files.rows(dataset.entries[number], "final", first, count)
    lead = where.start % files.alignment
    memory = aligned(-(-(lead + where.size) // files.alignment) * files.alignment)
    files.read(where, memory)
    found = torch.frombuffer(memory[lead : lead + where.size], dtype=torch.bfloat16)
    return found.view(count, WIDTH)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("first", "count"), [(0, 41), (0, 1), (40, 1), (7, 30)])
def test_rows_are_those_of_the_shard(dataset, direct: bool, first: int, count: int) -> None:
    files = dataset.row_files(direct=direct)
    for number in (1, 7):
        wanted = dataset.read(dataset.entries[number]).final[first : first + count]
        assert torch.equal(read(files, dataset, number, first, count), wanted)


def test_small_fields_come_in_exactly_their_bytes(dataset) -> None:
    files = dataset.row_files()
    where = files.rows(dataset.entries[3], "supervised", 2, 30)
    files.announce(where)
    memory = bytearray(30)
    files.read_cached(where, memoryview(memory))
    assert list(memory) == [int(n % 3 == 0) for n in range(2, 32)]


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_cut_after_it_was_opened_names_file_and_sample(dataset, tmp_path, direct) -> None:
    files = dataset.row_files(direct=direct)
    read(files, dataset, 1, 0, 41)
    path = tmp_path / "states-00000.safetensors"
    where = files.rows(dataset.entries[1], "final", 0, 41)
    os.truncate(path, where.start + 5 * 2 * WIDTH)
    with pytest.raises(ShardDamaged, match=r"states-00000.safetensors: final of sample s-0-1") as e:
        read(files, dataset, 1, 0, 41)
    assert "960 bytes before the file's end" in str(e.value)
    assert f"{41 * 2 * WIDTH} bytes" in str(e.value)


def test_a_bad_block_names_file_and_sample(dataset, monkeypatch) -> None:
    files = dataset.row_files(direct=True)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ShardDamaged, match=r"final of sample s-1-0.*Input/output error"):
        read(files, dataset, 2, 0, 50)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EFAULT])
def test_where_direct_reads_are_refused_the_cache_serves(dataset, monkeypatch, error) -> None:
    files, preadv, refused = dataset.row_files(direct=True), os.preadv, []

    def picky(file: int, memory: list[memoryview], offset: int) -> int:
        flags = int(Path(f"/proc/self/fdinfo/{file}").read_text().split("flags:")[1].split()[0], 8)
        if flags & os.O_DIRECT:
            refused.append(file)
            raise OSError(error, os.strerror(error))
        return preadv(file, memory, offset)

    monkeypatch.setattr(os, "preadv", picky)
    wanted = dataset.read(dataset.entries[2]).final
    assert torch.equal(read(files, dataset, 2, 0, 50), wanted)
    assert refused


def test_a_read_that_comes_in_parts_is_put_together(dataset, monkeypatch) -> None:
    files, preadv = dataset.row_files(direct=True), os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, m, o: preadv(f, [m[0][:5000]], o))
    assert torch.equal(read(files, dataset, 0, 0, 50), dataset.read(dataset.entries[0]).final)


def test_a_shard_of_another_size_or_header_is_refused(dataset, tmp_path) -> None:
    path = tmp_path / "states-00002.safetensors"
    data = path.read_bytes()
    files = dataset.row_files()
    path.write_bytes(data[:-1])
    with pytest.raises(ShardDamaged, match=r"states-00002.safetensors: \d+ bytes, header as"):
        read(files, dataset, 4, 0, 1)
    path.write_bytes(data[:20] + b"x" + data[21:])
    with pytest.raises(ShardDamaged, match="header not as its index says"):
        read(files, dataset, 4, 0, 1)
    path.unlink()
    with pytest.raises(ShardDamaged, match=r"states-00002.safetensors: No such file"):
        read(files, dataset, 4, 0, 1)


def test_a_dataset_that_memory_cannot_hold_goes_past_the_cache(dataset, monkeypatch) -> None:
    assert not dataset.row_files().direct
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 50}.get(name, 4096))
    assert dataset.row_files().direct


def opened(folder: Path) -> int:
    """Descriptors and maps of this process in a folder."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(folder == link.parent for link in links)


def test_few_shards_are_open_however_many_there_are(dataset, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "_OPEN_SHARDS", 2)
    files = dataset.row_files(direct=True)
    for number in (0, 2, 4, 6, 0):
        read(files, dataset, number, 0, 5)
    assert opened(tmp_path) <= 2 * 2
    del files
    assert opened(tmp_path) == 0


def test_few_maps_are_open_and_their_views_outlive_them(dataset, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reader, "_OPEN_MAPS", 2)
    first = dataset.read(dataset.entries[0]).final
    before = first.clone()
    for entry in dataset.entries:
        dataset.read(entry)
    assert opened(tmp_path) <= 3  # two, and the one that `first` holds
    assert torch.equal(first, before)
