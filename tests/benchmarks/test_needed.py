import dataclasses

import pytest
import torch

from benchmarks.train_step.cases import Case, Shape, asked_at, masks
from benchmarks.train_step.needed import Rows, count_rows, multiply_adds


def rows_of(text: str, *, steps: int) -> Rows:
    """Counts of documents written as 0 (not supervised) and 1, a space between two."""
    documents = text.split()
    supervised = torch.tensor([c == "1" for c in "".join(documents)])
    lengths = torch.tensor([len(document) for document in documents])
    return count_rows(
        supervised, torch.repeat_interleave(torch.arange(len(documents)), lengths), steps=steps
    )


def test_a_document_counted_by_hand() -> None:
    # Labels are tokens 3 and 4. Step 0 asks rows 1 and 2 for them, step 1 asks rows 0 and 1, so row
    # 0 lives at step 0 too. Teachers are rows 2 and 3. Rows see 1, 2, 3 keys at step 0; rows 0 and
    # 1 see 1 + 1 and 2 + 1 at step 1.
    assert rows_of("00011", steps=2) == Rows(
        keys=3, live=5, later=2, asked=4, teachers=2, query_tokens=3, key_tokens=3, pairs=11
    )


def test_rows_after_the_last_supervised_label_give_no_keys() -> None:
    # Token 2 is the only label: row 0 at step 0. Nothing else is computed.
    assert rows_of("00100000", steps=1) == Rows(
        keys=1, live=1, later=0, asked=1, teachers=1, query_tokens=1, key_tokens=1, pairs=1
    )


def test_a_row_that_is_asked_late_lives_in_the_steps_before() -> None:
    # Token 4: row 2 at step 0, row 1 at step 1, row 0 at step 2. Queries read tokens t + 1 + k:
    # 1 to 3; so do keys. Pairs: 1 + 2 + 3, then (1 + 1) + (2 + 1), then 1 + 2.
    assert rows_of("00001", steps=3) == Rows(
        keys=3, live=6, later=3, asked=3, teachers=1, query_tokens=3, key_tokens=3, pairs=14
    )


def test_no_label_is_read_across_a_border_of_documents() -> None:
    alone = rows_of("0011", steps=2)
    assert rows_of("0011 0011", steps=2) == Rows(
        **{name: 2 * value for name, value in dataclasses.asdict(alone).items()}
    )


@pytest.mark.parametrize("text", ["0000", "1", "11", "10", "110000"])
def test_nothing_is_needed_without_a_row_to_ask(text: str) -> None:
    assert set(dataclasses.asdict(rows_of(text, steps=3)).values()) == {0}


def test_multiply_adds_by_hand() -> None:
    rows = Rows(
        keys=3, live=5, later=2, asked=4, teachers=2, query_tokens=3, key_tokens=4, pairs=11
    )
    shape = Shape(H=2, I=3, heads=4, kv=1, d=5, V=11, D=7)
    assert multiply_adds(rows, shape) == {
        "fc": 2 * 3 * 6 * 2,
        "embedding half": 2 * (3 * 2 * 20 + 4 * 2 * 10),
        "keys and values": 3 * (3 + 2) * 2 * 10,
        "queries": 3 * 5 * 2 * 20,
        "output": 3 * 5 * 20 * 2,
        "mlp": 3 * 5 * 3 * 2 * 3,
        "head": 3 * 4 * 2 * 7,
        "teacher": 2 * 2 * 7,
        "attention": 7 * 11 * 20,
    }


def test_the_last_share_of_each_document_is_supervised() -> None:
    supervised, document = masks(Case("tiny", 20, 0.3, 1, "batch", document=10))
    assert supervised.nonzero().flatten().tolist() == [7, 8, 9, 17, 18, 19]
    assert document.tolist() == [0] * 10 + [1] * 10


def test_a_shifted_mask_asks_the_same_pairs() -> None:
    case = Case("tiny", 24, 0.5, 3, "batch", document=8)
    supervised, document = masks(case)
    there = asked_at(case, ahead=2)
    # Inside a document, reading the shifted mask at t + k is reading the labels at t + 2 + k.
    for k in range(case.steps):
        for t in range(case.tokens - 2 - k):
            if document[t + 2 + k] == document[t]:
                assert there[t + k] == supervised[t + 2 + k]
    assert not there[6:8].any()
