"""Records of token ids: taken as they stand, or skipped for one stated reason."""

from typing import Any

import pytest

from pipeline.conversations.normalise import Skip
from pipeline.conversations.tokens import Tokens, read_tokens


def read(value: Any) -> Tokens:
    return read_tokens(value, vocabulary_size=10, max_length=6)


@pytest.mark.parametrize("mask", [[0, 1, 1], [False, True, True], [0.0, 1.0, 1.0]])
def test_ids_and_mask_are_taken_as_they_stand(mask: list[Any]) -> None:
    found = read({"input_ids": [3, 0, 9], "loss_mask": mask, "id": "x"})
    assert found == Tokens([3, 0, 9], [False, True, True])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1, 2], "not_a_record"),
        ({"loss_mask": [1]}, "no_tokens"),
        ({"input_ids": [1]}, "no_tokens"),
        ({"input_ids": "12", "loss_mask": [0, 1]}, "no_tokens"),
        ({"input_ids": [], "loss_mask": []}, "no_tokens"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "lengths_differ"),
        ({"input_ids": [1, 10], "loss_mask": [0, 1]}, "outside_vocabulary"),
        ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "outside_vocabulary"),
        ({"input_ids": [1, True], "loss_mask": [0, 1]}, "bad_ids"),
        ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, "bad_ids"),
        ({"input_ids": [1, None], "loss_mask": [0, 1]}, "bad_ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "bad_mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "bad_mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, "1"]}, "bad_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1, 0]}, "nothing_supervised"),
        ({"input_ids": [1] * 7, "loss_mask": [1] * 7}, "too_long"),
    ],
)
def test_a_record_that_cannot_be_used_has_one_reason(value: Any, reason: str) -> None:
    with pytest.raises(Skip) as caught:
        read(value)
    assert caught.value.reason == reason
