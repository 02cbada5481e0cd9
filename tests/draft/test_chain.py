import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.draft import chain
from pipeline.draft.chain import asked_rows, plan_chains


def masks(lengths: list[int], marked: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    supervised = torch.zeros(sum(lengths), dtype=torch.bool)
    supervised[marked] = True
    return supervised, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@pytest.mark.parametrize(
    ("lengths", "answer", "rows_by_step"),
    [
        ([10], [4, 5, 6, 7], [[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]),
        ([10], [3, 7, 8], [[1, 5, 6], [0, 4, 5], [3, 4]]),
        ([10], [8, 9], [[6, 7], [5, 6], [4, 5]]),  # touches the end: nothing past it, no wrap
        ([10], [5], [[3], [2], [1]]),
        ([10], [0, 1], [[], [], []]),  # no row can be asked for the first two tokens
        ([4, 4], [3, 4, 5, 6], [[1, 4], [0], []]),  # labels never cross into another document
    ],
)
def test_asked_rows_are_those_whose_label_is_in_an_answer(lengths, answer, rows_by_step):
    supervised, document = masks(lengths, answer)
    asked = [asked_rows(supervised, document, step=k).nonzero().flatten() for k in range(3)]
    assert [rows.tolist() for rows in asked] == rows_by_step


def test_a_row_lives_until_its_last_label():
    plan = plan_chains(*masks([10], [5]), steps=3)
    assert [step.rows.tolist() for step in plan.steps] == [[1, 2, 3], [1, 2], [1]]
    assert plan.steps[0].asked.tolist() == [2]
    assert plan.keys.tolist() == [0, 1, 2, 3]


def test_a_document_without_labels_gets_no_work():
    plan = plan_chains(*masks([5, 6, 5], [9]), steps=1)
    assert plan.keys.tolist() == [5, 6, 7]
    assert plan.query_tokens.tolist() == [8]
    assert [(s.first, s.last, s.key_first, s.key_last) for s in plan.steps[0].spans] == [
        (0, 1, 0, 3)
    ]


@pytest.mark.parametrize(("lengths", "marked"), [([8], []), ([1, 1, 2], [0, 1, 2, 3])])
def test_nothing_asked_means_no_steps(lengths, marked):
    plan = plan_chains(*masks(lengths, marked), steps=3)
    assert plan.steps == ()
    assert plan.keys.tolist() == []


@given(st.data())
def test_spans_show_each_row_exactly_its_own_documents_past(data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    T = sum(lengths)
    supervised = torch.tensor(data.draw(st.lists(st.booleans(), min_size=T, max_size=T)))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    before, chain.QUERY_BLOCK = chain.QUERY_BLOCK, 3
    try:
        plan = plan_chains(supervised, document, steps=3)
    finally:
        chain.QUERY_BLOCK = before
    for step in plan.steps:
        covered = [row for span in step.spans for row in range(span.first, span.last)]
        assert covered == list(range(len(step.rows)))
        for span in step.spans:
            for row in range(span.first, span.last):
                t = int(step.rows[row])
                seen = plan.keys[span.key_first : min(span.key_last, int(step.key_limit[row]))]
                wanted = [j for j in range(t + 1) if document[j] == document[t]]
                assert seen.tolist() == wanted
                assert int(step.key_start[row]) == span.key_first
