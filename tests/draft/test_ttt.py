import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.draft.errors import PackError
from pipeline.draft.ttt import StepMetrics, pack_loss, pack_weight
from tests.draft.make import make_config, make_drafter, make_pack
from tests.draft.reference import dense_loss


def both(config, lengths, supervised, *, steps, kind="kl", seed=0, decay=0.8):
    """Fast and dense results of one case, each with the gradients by name."""
    model = make_drafter(config, seed=seed)
    pack, embedding, head, vocabulary = make_pack(config, lengths, supervised, seed=seed)
    fast = pack_loss(
        model, pack, embedding=embedding, teacher_head=head, draft_vocabulary=vocabulary,
        steps=steps, decay=decay, kind=kind,
    )  # fmt: skip
    fast.loss.backward()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    fields = {field.name: getattr(pack, field.name) for field in dataclasses.fields(pack)}
    dense = dense_loss(
        weights, config, **fields, embedding=embedding, teacher_head=head,
        target_ids=vocabulary.target_ids, steps=steps, decay=decay, kind=kind,
    )  # fmt: skip
    dense[0].backward()
    gradients = {  # the dense form leaves a gradient out where nothing depends on the weight
        n: (p.grad, torch.zeros_like(p) if weights[n].grad is None else weights[n].grad)
        for n, p in model.named_parameters()
    }
    return fast, dense, gradients


def assert_same(fast, dense, gradients):
    loss, weight, metrics = dense
    assert fast.loss.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    assert fast.weight == pytest.approx(weight, rel=1e-12)
    for name, values in metrics.items():
        assert getattr(fast.metrics, name).tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
    for name, (one, other) in gradients.items():
        scale = float(other.norm()) + 1e-12
        assert float((one - other).norm()) / scale < 1e-9, name


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_sparse_form_equals_the_dense_one(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    T = sum(lengths)
    supervised = data.draw(
        st.one_of(
            st.just([True] * T),
            st.lists(st.booleans(), min_size=T, max_size=T),
            st.integers(0, T - 1).map(lambda i: [j == i for j in range(T)]),
        )
    )
    config = make_config(
        norm_output=data.draw(st.booleans()),
        draft_vocabulary_size=data.draw(st.sampled_from([1, 7, 11])),
    )
    case = both(
        config, lengths, supervised, steps=data.draw(st.integers(1, 8)),
        kind=data.draw(st.sampled_from(["kl", "tv"])), seed=data.draw(st.integers(0, 9)),
    )  # fmt: skip
    assert_same(*case)


@pytest.mark.parametrize("length", [300, 700])
def test_documents_longer_than_a_query_block_are_exact(length):
    supervised = [j % 5 < 2 for j in range(length + 9)]
    assert_same(*both(make_config(), [length, 9], supervised, steps=3))


def test_more_teacher_rows_than_a_chunk_are_exact():
    assert_same(*both(make_config(), [130] * 4, [True] * 520, steps=2))


@pytest.mark.parametrize("supervised", [[False] * 8, [True, True] + [False] * 6])
def test_a_pack_without_labels_gives_zero_and_zero_gradients(supervised):
    fast, _, gradients = both(make_config(), [8], supervised, steps=3)
    assert fast.loss.item() == 0
    assert fast.weight == 0
    assert all(not one.any() for one, _ in gradients.values())


@pytest.mark.parametrize(
    ("lengths", "marked", "steps", "wanted"),
    [
        ([10], [4, 5, 6, 7], 3, 4 + 4 * 0.8 + 4 * 0.64),
        ([10], [3], 3, 1 + 0.8),  # label 3: rows 1 and 0; no row for step 2
        ([3, 3], [2, 3, 4, 5], 2, 2.0),  # one row in each document, step 0 only
        ([5], [], 3, 0.0),
    ],
)
def test_weight_by_hand(lengths, marked, steps, wanted):
    supervised = torch.tensor([j in marked for j in range(sum(lengths))])
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert pack_weight(supervised, document, steps=steps, decay=0.8) == pytest.approx(wanted)


def test_only_rows_whose_label_is_supervised_teach():
    # B13: answer at 4..7 of 10. Teachers stand at label - 1: rows 3..6, whatever the step.
    config = make_config()
    pack, embedding, head, vocabulary = make_pack(config, [10], [3 < j < 8 for j in range(10)])
    final = pack.final.requires_grad_(False)
    run = lambda final: pack_loss(  # noqa: E731
        make_drafter(config), dataclasses.replace(pack, final=final), embedding=embedding,
        teacher_head=head, draft_vocabulary=vocabulary, steps=3, decay=0.8,
    ).loss.item()  # fmt: skip
    base, moved = run(final), []
    for row in range(10):
        changed = final.clone()
        changed[row] += 1
        moved.append(row) if run(changed) != base else None
    assert moved == [3, 4, 5, 6]


def test_packing_documents_together_adds_their_losses():
    config = make_config()
    model = make_drafter(config)
    pack, embedding, head, vocabulary = make_pack(config, [6, 9], [True] * 15)

    def run(rows: slice):
        part = {f.name: getattr(pack, f.name)[rows] for f in dataclasses.fields(pack)}
        return pack_loss(
            model, dataclasses.replace(pack, **part), embedding=embedding, teacher_head=head,
            draft_vocabulary=vocabulary, steps=3, decay=0.8,
        )  # fmt: skip

    whole, parts = run(slice(0, 15)), (run(slice(0, 6)), run(slice(6, 15)))
    assert whole.loss.item() == pytest.approx(sum(part.loss.item() for part in parts), rel=1e-12)
    assert whole.weight == pytest.approx(sum(part.weight for part in parts))
    added = parts[0].metrics + parts[1].metrics
    torch.testing.assert_close(whole.metrics.to_tensor(), added.to_tensor())


def test_bf16_parameters_give_nearly_the_same_gradients():
    config = make_config(hidden_size=64, target_hidden_size=64, head_dim=16, intermediate_size=96)
    pack, embedding, head, vocabulary = make_pack(config, [40, 30], [True] * 70)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_drafter(config).to(dtype)
        result = pack_loss(
            model, pack, embedding=embedding.to(dtype), teacher_head=head.to(dtype) / 8,
            draft_vocabulary=vocabulary, steps=3, decay=0.8,
        )  # fmt: skip
        result.loss.backward()
        assert result.loss.dtype == torch.float32
        flat = torch.cat([p.grad.float().flatten() for p in model.parameters()])
        results.append((result.loss.item(), flat))
    (loss32, grad32), (loss16, grad16) = results
    assert loss16 == pytest.approx(loss32, rel=0.02)
    assert float(torch.cosine_similarity(grad32, grad16, dim=0)) > 0.995


def test_no_tensor_of_rows_by_draft_vocabulary_is_kept():
    # All that backward holds is linear in rows x width: 40 times the draft vocabulary adds nothing.
    held = []
    for D in (10, 400):
        config = make_config(draft_vocabulary_size=D, target_vocabulary_size=400)
        pack, embedding, head, vocabulary = make_pack(config, [200, 200], [True] * 400)
        sizes: dict[int, int] = {}

        def note(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            pack_loss(
                make_drafter(config), pack, embedding=embedding, teacher_head=head,
                draft_vocabulary=vocabulary, steps=3, decay=0.8,
            )  # fmt: skip
        held.append(sum(sizes.values()))
    head_bytes = 390 * 12 * 8  # the head and its gradient do grow with D
    assert held[1] - held[0] <= 3 * head_bytes


def test_metrics_survive_the_way_through_one_tensor():
    table = torch.arange(10, dtype=torch.float64).view(5, 2)
    assert StepMetrics.from_tensor(table).loss.tolist() == [8, 9]
    assert torch.equal((StepMetrics.zeros(2) + StepMetrics.from_tensor(table)).to_tensor(), table)


@pytest.mark.parametrize("field", ["taps", "final", "supervised", "position"])
def test_a_pack_that_does_not_fit_is_refused_by_name(field):
    config = make_config()
    pack, embedding, head, vocabulary = make_pack(config, [6], [True] * 6)
    with pytest.raises(PackError, match=field):
        pack_loss(
            make_drafter(config), dataclasses.replace(pack, **{field: getattr(pack, field)[:5]}),
            embedding=embedding, teacher_head=head, draft_vocabulary=vocabulary, steps=3, decay=0.8,
        )  # fmt: skip


def test_a_perfect_drafter_reaches_the_teachers_entropy():
    # Head and teacher alike on equal states: cross-entropy is the entropy, overlap the whole row.
    config = make_config()
    pack, embedding, _, vocabulary = make_pack(config, [5], [True] * 5)
    model = make_drafter(config)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = pack_loss(
        model, pack, embedding=embedding, teacher_head=torch.zeros(7, 12, dtype=torch.float64),
        draft_vocabulary=vocabulary, steps=1, decay=0.8,
    )  # fmt: skip
    assert result.loss.item() == pytest.approx(3 * math.log(7))
    assert result.metrics.overlap.tolist() == pytest.approx([3.0])
