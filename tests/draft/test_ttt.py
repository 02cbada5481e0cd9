import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.draft import backward
from pipeline.draft import loss as head
from pipeline.draft.chain import chain_weight, plan_chains
from pipeline.draft.errors import PackError
from pipeline.draft.ttt import Frozen, StepMetrics, pack_loss
from pipeline.draft.weights import BUCKETS, Weights
from tests.draft.make import make_config, make_drafter, make_rows, run
from tests.draft.reference import dense_loss


def both(config, lengths, supervised, *, steps, kind="kl", seed=0, decay=0.8):
    """Fast and dense results of one case, each with the gradients by name."""
    model = make_drafter(config, seed=seed)
    rows, embedding, head, vocabulary = make_rows(config, lengths, supervised, seed=seed)
    pack = rows.pack(steps=steps, decay=decay)
    fast, found = run(model, pack, Frozen.of(embedding, head, vocabulary), kind=kind)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    fields = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    dense = dense_loss(
        weights, config, **fields, embedding=embedding, teacher_head=head,
        target_ids=vocabulary.target_ids, steps=steps, decay=decay, kind=kind,
    )  # fmt: skip
    dense[0].backward()
    gradients = {  # the dense form leaves a gradient out where nothing depends on the weight
        n: (found[n], torch.zeros_like(w) if w.grad is None else w.grad) for n, w in weights.items()
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


@settings(max_examples=40)
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


def test_more_asked_rows_than_a_chunk_are_exact(monkeypatch):
    monkeypatch.setitem(head.ASKED_ROWS, "cpu", 8)
    assert_same(*both(make_config(), [13] * 4, [True] * 52, steps=3))


@pytest.mark.parametrize("most", [1, 20, 40])
def test_more_rows_than_a_group_of_steps_are_exact(monkeypatch, most):
    monkeypatch.setattr(backward, "GROUP_ROWS", most)  # of 13 and 9 live rows a step
    for norm_output in (False, True):
        config = make_config(norm_output=norm_output)
        assert_same(*both(config, [9, 7], [True] * 16, steps=5))
        as_wide = make_config(norm_output=norm_output, heads=3, kv_heads=1)  # memory serves again
        assert_same(*both(as_wide, [9, 7], [True] * 16, steps=5))


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
    found = chain_weight(supervised, document, steps=steps, decay=0.8)
    assert found == pytest.approx(wanted)
    plan = plan_chains(supervised, document, steps=steps, decay=0.8)
    assert plan.weight == pytest.approx(wanted)


def test_only_rows_whose_label_is_supervised_teach():
    # B13: answer at 4..7 of 10. Teachers stand at label - 1: rows 3..6, whatever the step.
    config = make_config()
    rows, *frozen = make_rows(config, [10], [3 < j < 8 for j in range(10)])
    assert rows.pack(steps=3).plan.teachers.tolist() == [3, 4, 5, 6]

    def loss(final):
        pack = dataclasses.replace(rows, final=final).pack(steps=3)
        return run(make_drafter(config), pack, Frozen.of(*frozen), learn=False)[0].loss.item()

    base, moved = loss(rows.final), []
    for row in range(10):
        changed = rows.final.clone()
        changed[row] += 1
        moved.append(row) if loss(changed) != base else None
    assert moved == [3, 4, 5, 6]


def test_packing_documents_together_adds_their_losses():
    config = make_config()
    model = make_drafter(config)
    rows, *frozen = make_rows(config, [6, 9], [True] * 15)

    def part(which: slice):
        cut = {f.name: getattr(rows, f.name)[which] for f in dataclasses.fields(rows)}
        pack = dataclasses.replace(rows, **cut).pack(steps=3)
        return run(model, pack, Frozen.of(*frozen), learn=False)[0]

    whole, parts = part(slice(0, 15)), (part(slice(0, 6)), part(slice(6, 15)))
    assert whole.loss.item() == pytest.approx(sum(part.loss.item() for part in parts), rel=1e-12)
    assert whole.weight == pytest.approx(sum(part.weight for part in parts))
    added = parts[0].metrics + parts[1].metrics
    torch.testing.assert_close(whole.metrics.to_tensor(), added.to_tensor())


def test_gradients_are_added_with_their_scale_or_written_afresh():
    config = make_config()
    weights = Weights.of(make_drafter(config))
    packs = [make_rows(config, [n], [True] * n, seed=n)[0].pack(steps=3) for n in (7, 9)]
    frozen = Frozen.of(*make_rows(config, [7], [True] * 7)[1:])

    def add(into, pack, **options):
        pack_loss(weights, pack, config=config, frozen=frozen, gradients=into, **options)

    alone = [Weights.zeros(config, dtype=torch.float64) for _ in packs]
    for into, pack in zip(alone, packs, strict=True):
        add(into, pack)
    both_in = Weights.zeros(config, dtype=torch.float64)
    for bucket in BUCKETS:
        getattr(both_in, bucket).fill_(torch.nan)  # fresh: nothing of what was there is read
    add(both_in, packs[0], scale=0.25, fresh=True)
    add(both_in, packs[1], scale=0.25)
    for bucket in BUCKETS:
        one, other = (getattr(gradient, bucket) for gradient in alone)
        torch.testing.assert_close(getattr(both_in, bucket), (one + other) / 4)


@pytest.mark.parametrize("marked", [[3, 4], []])
def test_each_bucket_is_reported_once_its_gradient_is_complete(marked):
    config = make_config()
    weights = Weights.of(make_drafter(config))
    rows, *frozen = make_rows(config, [8], [j in marked for j in range(8)])
    gradients = Weights.zeros(config, dtype=torch.float64)
    seen = {}
    pack_loss(
        weights, rows.pack(steps=2), config=config, frozen=Frozen.of(*frozen), fresh=True,
        gradients=gradients, finished=lambda b: seen.update({b: getattr(gradients, b).clone()}),
    )  # fmt: skip
    assert list(seen) == ["head", "down", "gate_up", "o", "qkv", "fc", "norms"]
    for bucket, then in seen.items():
        assert torch.equal(then, getattr(gradients, bucket))


def test_bf16_weights_give_nearly_the_same_gradients():
    config = make_config(hidden_size=64, target_hidden_size=64, head_dim=16, intermediate_size=96)
    rows, embedding, head, vocabulary = make_rows(config, [40, 30], [True] * 70)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        cast = dataclasses.replace(rows, taps=rows.taps.to(dtype), final=rows.final.to(dtype))
        frozen = Frozen.of(embedding, head.to(dtype) / 8, vocabulary)
        result, found = run(make_drafter(config).to(dtype), cast.pack(steps=3), frozen)
        assert result.loss.dtype == torch.float32
        results.append((result.loss.item(), torch.cat([g.flatten() for g in found.values()])))
    (loss32, grad32), (loss16, grad16) = results
    assert grad16.dtype == torch.float32
    assert loss16 == pytest.approx(loss32, rel=0.02)
    assert float(torch.cosine_similarity(grad32, grad16, dim=0)) > 0.995


def test_no_tensor_of_rows_by_draft_vocabulary_is_made():
    # The largest tensor of a step must not be asked rows x draft vocabulary, but one chunk of it.
    config = make_config(draft_vocabulary_size=400, target_vocabulary_size=400)
    rows, *frozen = make_rows(config, [50] * 20, [True] * 1000)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    pack = rows.pack(steps=3)
    with Watch():
        run(make_drafter(config), pack, Frozen.of(*frozen))
    assert len(pack.plan.asked) > 2800
    assert largest <= head.ASKED_ROWS["cpu"] * 400


def test_metrics_survive_the_way_through_one_tensor():
    table = torch.arange(10, dtype=torch.float64).view(5, 2)
    assert StepMetrics.from_tensor(table).loss.tolist() == [8, 9]
    assert torch.equal((StepMetrics.zeros(2) + StepMetrics.from_tensor(table)).to_tensor(), table)


@pytest.mark.parametrize(
    ("field", "change"),
    [("taps", "shorter"), ("final", "shorter"), ("ids", "shorter"), ("taps", ""), ("final", "")],
)
def test_a_pack_that_does_not_fit_is_refused_by_name(field, change):
    config = make_config()
    rows, *frozen = make_rows(config, [6], [True] * 6)
    pack = rows.pack(steps=3)
    tensor = getattr(pack, field)
    other = tensor[:-1] if change == "shorter" else tensor.float()
    with pytest.raises(PackError, match=field):
        run(make_drafter(config), dataclasses.replace(pack, **{field: other}), Frozen.of(*frozen))


@pytest.mark.parametrize("field", ["taps", "final", "supervised", "document"])
def test_whole_tensors_of_other_lengths_make_no_pack(field):
    rows, *_ = make_rows(make_config(), [6], [True] * 6)
    with pytest.raises(PackError, match=field):
        dataclasses.replace(rows, **{field: getattr(rows, field)[:5]}).pack(steps=3)


def test_a_perfect_drafter_reaches_the_teachers_entropy():
    # Head and teacher alike on equal states: cross-entropy is the entropy, overlap the whole row.
    config = make_config()
    rows, embedding, _, vocabulary = make_rows(config, [5], [True] * 5)
    model = make_drafter(config)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    frozen = Frozen.of(embedding, torch.zeros(7, 12, dtype=torch.float64), vocabulary)
    result, _ = run(model, rows.pack(steps=1), frozen)
    assert result.loss.item() == pytest.approx(3 * math.log(7))
    assert result.metrics.overlap.tolist() == pytest.approx([3.0])
