"""A drafter's settings in the spelling of Hugging Face configurations, which peers read."""

from typing import Any

import torch

from benchmarks.train_step.cases import RMS_EPS, ROPE_THETA, Shape


def drafter_settings(shape: Shape) -> dict[str, Any]:
    """The settings of a one-layer Llama drafter."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.H,
        "target_hidden_size": shape.H,
        "intermediate_size": shape.I,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv,
        "head_dim": shape.d,
        "num_hidden_layers": 1,
        "vocab_size": shape.V,
        "draft_vocab_size": shape.D,
        "hidden_act": "silu",
        "rms_norm_eps": RMS_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": 32768,
        "pretraining_tp": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def attention_of(device: torch.device, *, flex: str = "flex_attention") -> str:
    """The attention a peer uses as it ships; on a CPU flex attention has no backward."""
    return flex if device.type == "cuda" else "sdpa"
