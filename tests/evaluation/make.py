"""Tiny targets and drafters, built in place."""

import dataclasses
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.draft.config import DrafterConfig
from pipeline.draft.model import Drafter
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.evaluation.serving import ServingDrafter

V, D, H = 48, 24, 32


def drafter_config(**changes: Any) -> DrafterConfig:
    return dataclasses.replace(
        DrafterConfig(
            hidden_size=H,
            target_hidden_size=H,
            intermediate_size=40,
            heads=4,
            kv_heads=2,
            head_dim=8,
            draft_vocabulary_size=D,
            target_vocabulary_size=V,
            rope_theta=100.0,
            rope_scaling=None,
            rms_norm_eps=1e-5,
            max_position_embeddings=256,
            norm_output=False,
            taps=(1, 2, 4),
        ),
        **changes,
    )


def vocabulary_of(targets: list[int], size: int = V) -> DraftVocabulary:
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[targets] = True
    return DraftVocabulary(torch.tensor(targets) - torch.arange(len(targets)), t2d)


def random_drafter(config: DrafterConfig, *, seed: int = 0, dtype: torch.dtype) -> Drafter:
    """Weights far from their start, uneven norms: every part of the recursion shows."""
    generator = torch.Generator().manual_seed(seed)
    model = Drafter(config)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.4 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, spread, generator=generator)
    return model.to(dtype).eval()


def tiny_target(*, seed: int = 0, dtype: torch.dtype, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=False,
        **changes,
    )
    return LlamaForCausalLM(config).to(dtype).requires_grad_(False).eval()


def counting_target(size: int) -> Any:
    """A target whose answer to token x is x + 1 (mod size): its layers add nothing."""
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=4,
        num_hidden_layers=5,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(torch.eye(size).roll(1, 0))  # row x + 1 answers to token x
    return model


def two_ahead_drafter(size: int, targets: list[int]) -> ServingDrafter:
    """Says x + 2 to the row of token x, at every step: right at step 0, wrong at later ones."""
    config = drafter_config(
        hidden_size=size,
        target_hidden_size=size,
        draft_vocabulary_size=len(targets),
        target_vocabulary_size=size,
        rms_norm_eps=1e-6,
    )
    model = random_drafter(config, dtype=torch.float32)
    with torch.no_grad():
        model.fc.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, 2 * size)], 1))
        model.midlayer.self_attn.o_proj.weight.zero_()
        model.midlayer.mlp.down_proj.weight.zero_()
        model.norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(torch.eye(size).roll(2, 0)[targets])
    return ServingDrafter(model.eval(), vocabulary_of(targets, size), embedding=torch.eye(size))
