"""Rotary position embedding of the drafter, in the half-split layout that Llama uses."""

import math

import torch
from torch import Tensor

from pipeline.draft.config import DrafterConfig

RotaryTable = tuple[Tensor, Tensor]
"""cos and sin, each [R, 1, head_dim / 2]: one row a position, broadcast over heads."""


def frequencies(config: DrafterConfig, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians a position, [head_dim / 2] in `dtype`.

    Scalings "linear" and "llama3" as transformers 5.24 `modeling_rope_utils.py` defines them.
    """
    d = config.head_dim
    exponent = torch.arange(0, d, 2, dtype=dtype, device=device) / d
    inverse = 1.0 / torch.pow(config.rope_theta, exponent)
    scaling = config.rope_scaling or {}
    if config.rope_type == "linear":
        return inverse / float(scaling["factor"])
    if config.rope_type == "llama3":
        factor = float(scaling["factor"])
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        turns = inverse * (float(scaling["original_max_position_embeddings"]) / (2 * math.pi))
        # 0 where the wave is longer than the original window (fully slowed), 1 where it is short.
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return inverse * (share + (1 - share) / factor)
    return inverse


def rotary_table(config: DrafterConfig, position: Tensor, *, dtype: torch.dtype) -> RotaryTable:
    """Tables of cos and sin at `position` int64 [R], each [R, 1, head_dim / 2] in `dtype`.

    Angles are made in float32 (float64 for a float64 model): bf16 angles are wrong from
    position 256 on.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angle = position.to(wide)[:, None] * frequencies(config, dtype=wide, device=position.device)
    return angle.cos().to(dtype)[:, None], angle.sin().to(dtype)[:, None]


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Queries or keys [R, heads, head_dim] turned to their positions."""
    cos, sin = table
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def rotary_rows(
    config: DrafterConfig, positions: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions 0..positions-1, each [positions, head_dim / 2] in `dtype`.

    dtype: float32 or wider, in which the angles are made too.
    """
    turns = frequencies(config, dtype=dtype, device=device)
    angle = torch.arange(positions, dtype=dtype, device=device)[:, None] * turns
    return angle.cos(), angle.sin()
