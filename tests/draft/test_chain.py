import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.draft import chain
from pipeline.draft.chain import asked_rows, chain_weight, plan_chains


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
    plan = plan_chains(*masks([10], [5]), steps=3, decay=0.5)
    # Step 0 holds rows 1, 2, 3 in places 0..2; step 1 rows 1, 2; step 2 row 1.
    assert plan.steps == ((0, 3), (3, 5), (5, 6))
    assert plan.keys.tolist() == [0, 1, 2, 3]
    assert plan.at_keys.tolist() == [1, 2, 3]
    assert plan.previous.tolist() == [0, 1, 3]
    assert plan.position.tolist() == [1, 2, 3, 1 + 1, 2 + 1, 1 + 2]
    assert [plan.own(k).tolist() for k in range(3)] == [[], [[0, 1]], [[0], [2]]]
    assert plan.teachers.tolist() == [4]
    assert plan.asked.tolist() == [2, 4, 5]  # row 3 at step 0, row 2 at step 1, row 1 at step 2
    assert plan.label.tolist() == [5, 5, 5]
    assert plan.asked_step.tolist() == [0, 1, 2]
    assert plan.judged.tolist() == [0, 3]
    assert plan.counts == (1, 1, 1)
    assert plan.weight == 1.75


def test_a_document_without_labels_gets_no_work():
    plan = plan_chains(*masks([5, 6, 5], [9]), steps=1, decay=1.0)
    assert plan.keys.tolist() == [5, 6, 7]
    assert plan.key_position.tolist() == [0, 1, 2]
    assert plan.tokens.tolist() == [6, 7, 8]
    assert plan.tokens[plan.query_at].tolist() == [8]
    assert [(s.first, s.last, s.key_first, s.key_last) for s in plan.spans(0)] == [(0, 1, 0, 3)]


@pytest.mark.parametrize(("lengths", "marked"), [([8], []), ([1, 1, 2], [0, 1, 2, 3])])
def test_nothing_asked_means_no_steps(lengths, marked):
    plan = plan_chains(*masks(lengths, marked), steps=3, decay=1.0)
    assert plan.steps == ()
    assert plan.keys.tolist() == []
    assert plan.counts == (0, 0, 0)


def draw(data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    T = sum(lengths)
    supervised = torch.tensor(data.draw(st.lists(st.booleans(), min_size=T, max_size=T)))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    steps = data.draw(st.integers(1, 8))
    return supervised, document, plan_chains(supervised, document, steps=steps, decay=0.8)


def stacked(plan):
    """(row, step) of every stack place, from the places that the plan names."""
    pairs = []
    for k, (first, last) in enumerate(plan.steps):
        if k == 0:
            pairs = [(row, 0) for row in plan.keys[plan.at_keys].tolist()]
            continue
        before = plan.previous[first - plan.steps[0][1] : last - plan.steps[0][1]].tolist()
        pairs += [(pairs[place][0], k) for place in before]
    return pairs


@given(st.data())
def test_every_index_of_a_plan_leads_to_its_row_and_step(data):
    supervised, document, plan = draw(data)
    T, M1 = len(document), plan.stack - (plan.steps[0][1] if plan.steps else 0)
    pairs, R0 = stacked(plan), plan.stack - M1
    last = {}  # the last step at which a row is asked
    for k in range(len(plan.counts)):
        for row in asked_rows(supervised, document, step=k).nonzero().flatten().tolist():
            last[row] = k
    assert pairs == [
        (r, k) for k in range(len(plan.steps)) for r in range(T) if last.get(r, -1) >= k
    ]
    tokens, queries = plan.tokens.tolist(), plan.tokens[plan.query_at].tolist()
    assert [queries[i] for i in plan.query_token.tolist()] == [r + 1 + k for r, k in pairs]
    assert [tokens[i] for i in plan.own_token.tolist()] == [r + 1 + k for r, k in pairs[R0:]]
    assert [tokens[i] for i in plan.key_token.tolist()] == [r + 1 for r in plan.keys.tolist()]
    for k, (first, end) in enumerate(plan.steps):
        for j, places in enumerate(plan.own(k).tolist(), start=1):
            assert [pairs[R0 + p] for p in places] == [(r, j) for r, _ in pairs[first:end]]
    readers = [(r, 0) for r in plan.keys.tolist()]
    for sources, of, place in (
        (plan.query_sources, queries, pairs), (plan.key_sources, tokens, pairs[R0:] + readers)
    ):  # fmt: skip
        found = sorted(
            (k, token, *place[p])
            for k, row in enumerate(sources.tolist())
            for token, p in zip(of, row, strict=True)
            if p >= 0
        )
        wanted = sorted((k, r + 1 + k, r, k) for r, k in place) if plan.steps else []
        assert found == wanted
    judged = [
        (*pairs[place], int(plan.teachers[judge]), label)
        for place, judge, label in zip(
            plan.asked.tolist(), plan.judge.tolist(), plan.label.tolist(), strict=True
        )
    ]
    assert sorted(judged) == sorted(
        (row, k, row + 1 + k, row + 2 + k)
        for k in range(len(plan.counts))
        for row in asked_rows(supervised, document, step=k).nonzero().flatten().tolist()
    )
    assert plan.judge.tolist() == sorted(plan.judge.tolist())
    assert plan.weight == pytest.approx(chain_weight(
        supervised, document, steps=len(plan.counts), decay=0.8
    ))  # fmt: skip


@given(st.data())
def test_a_plan_is_the_same_after_its_way_through_one_buffer(data):
    _, _, plan = draw(data)
    moved = plan.to(torch.device("cpu"))
    for name, tensor in vars(plan).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(getattr(moved, name), tensor), name


@given(st.data())
def test_spans_show_each_row_exactly_its_own_documents_past(data):
    before, chain.QUERY_BLOCK = chain.QUERY_BLOCK, 3
    try:
        _, document, plan = draw(data)
        spans = [plan.spans(k) for k in range(len(plan.steps))]
    finally:
        chain.QUERY_BLOCK = before
    pairs = stacked(plan)
    for (first, last), blocks in zip(plan.steps, spans, strict=True):
        covered = [row for span in blocks for row in range(span.first, span.last)]
        assert covered == list(range(last - first))
        for span in blocks:
            for row in range(span.first, span.last):
                t = pairs[first + row][0]
                seen = plan.keys[span.key_first : min(span.key_last, int(plan.limit[first + row]))]
                assert seen.tolist() == [j for j in range(t + 1) if document[j] == document[t]]
                assert int(plan.start[first + row]) == span.key_first
