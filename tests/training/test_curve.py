import pytest
import torch

from tests.training.curve import dense_curve, fast_curve


def test_a_short_training_has_the_losses_of_the_dense_form():
    dense, fast = dense_curve(), fast_curve("cpu", torch.float32)
    assert dense[-1] < 0.8 * dense[0]  # it learns
    assert fast == pytest.approx(dense, rel=1e-4)


def test_a_short_training_in_bfloat16_follows_the_dense_one():
    dense, fast = dense_curve(), fast_curve("cpu", torch.bfloat16)
    assert fast == pytest.approx(dense, rel=0.03)
