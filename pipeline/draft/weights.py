"""A drafter's weights as the training step reads them: one tensor where products can be joined.

Adjacent parameters (query, key and value; gate and up) lie one below the other in one *bucket*, so
that one product serves them. Gradients have the same shape.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pipeline.draft.config import DrafterConfig
from pipeline.draft.model import Drafter

BUCKETS = ("fc", "qkv", "o", "gate_up", "down", "norms", "head")
HIDDEN_NORM, INPUT_NORM, POST_NORM, FINAL_NORM = range(4)
"""Rows of `Weights.norms`."""


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of a drafter, or their gradients, on one device and in one dtype.

    fc [H, 3 * Ht]; qkv [(heads + 2 * kv_heads) * d, 2H]: the left half of a row reads the
    embedding; o [H, heads * d]; gate_up [2I, H]; down [H, I]; norms [4, H]: hidden_norm,
    input_layernorm, post_attention_layernorm, norm; head [D, H].
    """

    fc: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norms: Tensor
    head: Tensor

    @classmethod
    def of(cls, model: Drafter) -> Self:
        """Copies of a model's parameters, joined."""
        named = {name: p.detach() for name, p in model.named_parameters()}
        return cls.joined(named, model.config)

    @classmethod
    def joined(cls, named: Mapping[str, Tensor], config: DrafterConfig) -> Self:
        """Copies of tensors by parameter name, joined."""
        return cls(**{
            bucket: torch.cat([named[name].view(-1, shape[-1]) for name, shape in parts])
            for bucket, parts in layout(config).items()
        })  # fmt: skip

    @classmethod
    def zeros(
        cls, config: DrafterConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Self:
        """Zeros: gradients before anything was added."""
        shapes = {bucket: joined_shape(parts) for bucket, parts in layout(config).items()}
        return cls(**{b: torch.zeros(s, dtype=dtype, device=device) for b, s in shapes.items()})

    def by_name(self, config: DrafterConfig) -> dict[str, Tensor]:
        """Views by parameter name, in the parameters' shapes."""
        views = {}
        for bucket, parts in layout(config).items():
            joined = getattr(self, bucket)
            sizes = [math.prod(shape[:-1]) for _, shape in parts]
            for (name, shape), piece in zip(parts, torch.split(joined, sizes), strict=True):
                views[name] = piece.view(shape)
        return views

    def zero_(self) -> None:
        """Sets everything to zero."""
        for bucket in BUCKETS:
            getattr(self, bucket).zero_()


Parts = tuple[tuple[str, tuple[int, ...]], ...]


def joined_shape(parts: Parts) -> tuple[int, int]:
    """Shape of a bucket: its parameters one below the other, a vector being one row."""
    rows = sum(math.prod(shape[:-1]) for _, shape in parts)
    return rows, parts[0][1][-1]


def layout(config: DrafterConfig) -> dict[str, Parts]:
    """Parameter names and shapes of each bucket, in order from its first row down."""
    H, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    return {
        "fc": (("fc.weight", (H, len(config.taps) * config.target_hidden_size)),),
        "qkv": (
            (f"{attention}.q_proj.weight", (config.heads * d, 2 * H)),
            (f"{attention}.k_proj.weight", (config.kv_heads * d, 2 * H)),
            (f"{attention}.v_proj.weight", (config.kv_heads * d, 2 * H)),
        ),
        "o": ((f"{attention}.o_proj.weight", (H, config.heads * d)),),
        "gate_up": (
            (f"{mlp}.gate_proj.weight", (inner, H)),
            (f"{mlp}.up_proj.weight", (inner, H)),
        ),
        "down": ((f"{mlp}.down_proj.weight", (H, inner)),),
        "norms": (
            ("midlayer.hidden_norm.weight", (H,)),
            ("midlayer.input_layernorm.weight", (H,)),
            ("midlayer.post_attention_layernorm.weight", (H,)),
            ("norm.weight", (H,)),
        ),
        "head": (("lm_head.weight", (config.draft_vocabulary_size, H)),),
    }
