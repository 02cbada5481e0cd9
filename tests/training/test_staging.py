import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store.index import Entry
from pipeline.training.staging import parts


@given(data=st.data())
def test_parts_name_every_wanted_row_once_in_its_sample(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    total = sum(lengths)
    wanted = sorted(data.draw(st.sets(st.integers(0, total - 1))))
    entries = [Entry(f"s-{n}", "train", "shard", 0, rows, 0, "") for n, rows in enumerate(lengths)]
    starts = np.cumsum([0, *lengths[:-1]])
    found = parts(torch.tensor(wanted, dtype=torch.int64), entries, starts)
    rows, at = [], []
    for part in found:
        assert 0 <= part.first < part.first + part.count <= part.entry.length
        start = int(starts[entries.index(part.entry)]) + part.first
        rows += range(start, start + part.count)
        at += range(part.at, part.at + part.count)
    assert rows == wanted
    assert at == list(range(len(wanted)))
    # And in as few runs as there are: neighbours of one sample are never apart.
    ends = {(part.entry.id, part.first + part.count) for part in found}
    assert not any((part.entry.id, part.first) in ends for part in found)
