import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.draft.rotary import frequencies, rotary_table, rotate
from tests.draft.make import make_config

SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_scaled_frequencies_are_those_of_transformers(scaling):
    config = make_config(head_dim=64, rope_theta=10000.0, rope_scaling=scaling)
    theirs = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64,
        rope_parameters={"rope_theta": 10000.0, **scaling},
    )  # fmt: skip
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    ours = frequencies(config, dtype=torch.float32, device=torch.device("cpu"))
    assert factor == 1.0
    torch.testing.assert_close(ours, wanted)


def test_a_quarter_turn_by_hand():
    config = make_config(head_dim=2)
    position = torch.tensor([1])
    x = torch.tensor([[[3.0, 4.0]]])
    turned = rotate(x, rotary_table(config, position, dtype=torch.float32))
    cos, sin = math.cos(1), math.sin(1)
    torch.testing.assert_close(turned, torch.tensor([[[3 * cos - 4 * sin, 4 * cos + 3 * sin]]]))


def test_bf16_tables_keep_apart_neighbours_far_out():
    config = make_config(head_dim=4)
    cos, _ = rotary_table(config, torch.tensor([5000, 5001]), dtype=torch.bfloat16)
    torch.testing.assert_close(
        cos[:, 0, 0].float(), torch.tensor([5000.0, 5001.0]).cos(), atol=0.01, rtol=0
    )
