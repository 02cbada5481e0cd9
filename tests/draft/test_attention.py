import pytest
import torch
from torch import Tensor

from pipeline.draft import chain
from pipeline.draft.attention import attend, flex_block, merge
from pipeline.draft.chain import StepPlan, plan_chains

HEADS, KV, DIM = 4, 2, 8


def inputs(J: int, *, block: int = 3) -> tuple[StepPlan, list[Tensor]]:
    """The first step of two documents, and q, k, v, own keys and values with gradients."""
    supervised = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    document = torch.tensor([0] * 8 + [1] * 6)
    before, chain.QUERY_BLOCK = chain.QUERY_BLOCK, block
    try:
        plan = plan_chains(supervised, document, steps=2)
    finally:
        chain.QUERY_BLOCK = before
    step, generator = plan.steps[0], torch.Generator().manual_seed(J)
    R, N = step.rows.shape[0], plan.keys.shape[0]
    shapes = [(R, HEADS, DIM), (N, KV, DIM), (N, KV, DIM), (J, R, KV, DIM), (J, R, KV, DIM)]
    return step, [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def plain_block(q: Tensor, k: Tensor, v: Tensor, step: StepPlan) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the step-0 keys alone, by one dense softmax."""
    column = torch.arange(k.shape[0])
    see = (column >= step.key_start[:, None]) & (column < step.key_limit[:, None])
    scores = torch.einsum("rhd,chd->rhc", q, k.repeat_interleave(HEADS // KV, 1)) / DIM**0.5
    scores = scores.masked_fill(~see[:, None], float("-inf"))
    output = torch.einsum("rhc,chd->rhd", scores.softmax(-1), v.repeat_interleave(HEADS // KV, 1))
    return output, scores.logsumexp(-1)


def merged(step: StepPlan, tensors: list[Tensor], *, flex: bool) -> Tensor:
    q, k, v, own_key, own_value = tensors
    block = flex_block(q, k, v, plan=step, compiled=False) if flex else plain_block(q, k, v, step)
    return merge(*block, q, own_key=own_key, own_value=own_value)


@pytest.mark.parametrize("block", [1, 3, 256])
@pytest.mark.parametrize("J", [0, 1, 3])
def test_document_attention_equals_block_and_merge(J, block):
    step, tensors = inputs(J, block=block)
    fast = attend(tensors[0], *tensors[1:3], own_key=tensors[3], own_value=tensors[4], plan=step)
    plain = merged(step, tensors, flex=False)
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    seed = torch.randn(fast.shape, generator=torch.Generator().manual_seed(9), dtype=fast.dtype)
    used = tensors if J else tensors[:3]
    got, wanted = (torch.autograd.grad(out, used, seed) for out in (fast, plain))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# The eager form says that it is slow; here it is the point.
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("J", [0, 2])
def test_the_flex_form_equals_the_plain_twin(J):
    step, tensors = inputs(J)
    tensors = [tensor.detach() for tensor in tensors]
    torch.testing.assert_close(
        merged(step, tensors, flex=True), merged(step, tensors, flex=False), rtol=1e-9, atol=1e-9
    )


def test_merge_by_hand():
    # One row, one head, one dimension: block softmax over scores {0, 0} and own score log 2.
    output, lse = torch.tensor([[[5.0]]]), torch.tensor([[2.0]]).log()
    query, key = torch.ones(1, 1, 1), torch.full((1, 1, 1, 1), 2.0).log()
    got = merge(output, lse, query, own_key=key, own_value=torch.full((1, 1, 1, 1), 9.0))
    torch.testing.assert_close(got, torch.tensor([[[7.0]]]))  # half 5, half 9


def test_scores_far_apart_neither_overflow_nor_vanish():
    step, tensors = inputs(1)
    tensors = [tensor.detach().float() * 300 for tensor in tensors]
    fast = attend(tensors[0], *tensors[1:3], own_key=tensors[3], own_value=tensors[4], plan=step)
    assert torch.isfinite(fast).all()
    torch.testing.assert_close(fast, merged(step, tensors, flex=False), rtol=1e-3, atol=1e-2)
