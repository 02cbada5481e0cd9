import dataclasses

import pytest
import torch

from pipeline.kernels.attention import Span, attend
from tests.kernels.attention_chain import assert_near, computed, dense, make_chain

FIVE = (0.8, 0.7, 0.5, 0.3, 0.2)


@pytest.mark.parametrize("kv", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 7])
def test_outputs_and_gradients_are_those_of_a_dense_softmax(groups, kv):
    chain = make_chain([7, 1, 12, 5], FIVE, groups=groups, kv=kv)
    assert_near(computed(chain), dense(chain), relative=1e-13)


@pytest.mark.parametrize("block", [1, 4, 256])
@pytest.mark.parametrize("live", [(0.0,), (0.3, 0.0), (1.0, 1.0, 1.0), (0.3, -1.0)])
def test_any_rows_may_be_missing_and_blocks_be_of_any_size(live, block):
    chain = make_chain([9, 1, 6, 2], live, block=block)
    assert_near(computed(chain), dense(chain), relative=1e-13)


@pytest.mark.parametrize("steps", [1, 4])
def test_one_row_of_one_document(steps):
    chain = make_chain([1], (1.0,) * steps)
    assert_near(computed(chain), dense(chain), relative=1e-13)


def test_one_row_by_hand():
    # Two keys of score 0 and an own key of score log 2: half of the softmax each.
    out, lse = torch.empty(1, 1), torch.empty(1, 1)
    attend(
        torch.ones(1, 1),
        torch.tensor([[0.0, 4.0], [0.0, 6.0], [9.0, 9.0]]),
        torch.tensor([[9.0, 9.0], [0.6931472, 9.0]]),
        torch.tensor([[1]]),
        torch.tensor([0]),
        torch.tensor([2]),
        kv=1,
        spans=(Span(0, 1, 0, 2),),
        out=out,
        lse=lse,
    )
    torch.testing.assert_close(out, torch.tensor([[7.0]]))
    torch.testing.assert_close(lse, torch.tensor([[4.0]]).log())


def test_scores_far_apart_neither_overflow_nor_vanish():
    chain = make_chain([9, 5], FIVE, spread=300.0, dtype=torch.float32)
    found, wanted = computed(chain), dense(chain)
    # Gradients through such a softmax are rounding alone.
    assert all(torch.isfinite(tensor).all() for tensor in found)
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(found.lse.double(), wanted.lse, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-6)])
def test_narrow_dtypes_come_close(dtype, relative):
    chain = make_chain([30, 40], FIVE, dtype=dtype)
    assert_near(computed(chain), dense(chain), relative=relative)


def test_a_wrong_key_is_noticed():
    # The comparison itself: one key more or less for one row is no rounding.
    chain = make_chain([30, 40], (0.5,), dtype=torch.bfloat16)
    step = chain.steps[0]
    limit = step.limit.clone()
    limit[5] -= 1
    other = dataclasses.replace(chain, steps=(dataclasses.replace(step, limit=limit),))
    with pytest.raises(AssertionError, match="off by"):
        assert_near(computed(other), dense(chain), relative=1e-2)
