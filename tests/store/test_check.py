"""Damage in shards, by sample: whatever way the bytes come in."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.store.check import BadSample, StatesWatch
from pipeline.store.index import Entry, Sample, ShardIndex, tensor_bytes
from pipeline.store.layout import ShardLayout, state_fields

FIELDS = state_fields(6, taps=1)
LENGTHS = {"a": 3, "b": 1, "c": 4}
INDEX = ShardIndex(
    "states-00000.safetensors",
    8,
    "",
    tuple(
        Entry(name, "train", "states-00000.safetensors", offset, length, 1, "")
        for (name, length), offset in zip(LENGTHS.items(), (0, 3, 4), strict=True)
    ),
)
SAMPLES = {
    name: Sample(
        name, torch.arange(length, dtype=torch.int32), torch.ones(length, dtype=bool), "train"
    )
    for name, length in LENGTHS.items()
}


def shard(**changes: torch.Tensor) -> bytes:
    rows = {
        "tap_0": torch.ones(8, 6, dtype=torch.bfloat16),
        "final": torch.ones(8, 6, dtype=torch.bfloat16),
        "input_ids": torch.cat([sample.input_ids for sample in SAMPLES.values()]),
        "supervised": torch.ones(8, dtype=torch.bool),
        **changes,
    }
    data = b"".join(bytes(tensor_bytes(rows[field.name])) for field in FIELDS)
    return ShardLayout(FIELDS, 8).header() + data


def seen(data: bytes, cuts: list[int]) -> list[BadSample]:
    watch = StatesWatch(INDEX, FIELDS, SAMPLES.get)
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    for start, end in pairwise(edges):
        watch.see(memoryview(data)[start:end])
    return watch.found()


def damaged() -> bytes:
    taps = torch.ones(8, 6, dtype=torch.bfloat16)
    taps[2, 5] = float("nan")
    taps[3] = -0.0
    taps[7] = 0.0
    final = torch.ones(8, 6, dtype=torch.bfloat16)
    final[4, 0] = final[6, 3] = float("-inf")
    ids = torch.cat([sample.input_ids for sample in SAMPLES.values()])
    ids[5] += 256
    mask = torch.ones(8, dtype=torch.bool)
    mask[0] = False
    return shard(tap_0=taps, final=final, input_ids=ids, supervised=mask)


BAD = {
    ("a", "not finite", "tap_0", (2, 2)),
    ("a", "not as prepared", "supervised", (0, 0)),
    ("b", "all zero", "tap_0", (0, 0)),
    ("c", "all zero", "tap_0", (3, 3)),
    ("c", "not finite", "final", (0, 2)),
    ("c", "not as prepared", "input_ids", (1, 1)),
}
# States lie in bytes 4096 to 4288: rows are cut there more often than not.
CUTS = st.lists(st.integers(4090, 4330), max_size=12)


@settings(max_examples=100, derandomize=True)
@given(cuts=CUTS)
def test_rows_are_judged_the_same_wherever_pieces_end(cuts: list[int]) -> None:
    found = seen(damaged(), cuts)
    assert {(bad.id, bad.what, bad.field, bad.rows) for bad in found} == BAD
    assert len(found) == len(BAD)
    assert [bad.id for bad in found] == sorted(bad.id for bad in found)


@settings(max_examples=30, derandomize=True)
@given(cuts=CUTS)
def test_nothing_is_found_in_rows_as_captured(cuts: list[int]) -> None:
    least = torch.zeros(8, 6, dtype=torch.bfloat16)
    least[:, 5] = torch.finfo(torch.bfloat16).smallest_normal
    greatest = torch.full((8, 6), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert seen(shard(tap_0=least, final=-greatest), cuts) == []


def test_a_bad_sample_reads_as_a_sentence() -> None:
    assert str(BadSample("s-1", "all zero", "final", (2, 2))) == "s-1 final row 2: all zero"
    assert str(BadSample("s-1", "all zero", "final", (2, 5))) == "s-1 final rows 2 to 5: all zero"
    assert str(BadSample("s-1", "is cut off")) == "s-1: is cut off"
