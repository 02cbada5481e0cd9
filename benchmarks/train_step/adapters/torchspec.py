"""TorchSpec: its EAGLE-3 model, target probabilities and optimizer, called as its trainer does.

Its trainer class wants Ray and a store of hidden states; what that class does for one batch of one
device is called here in the same order, with flex attention and without recomputation, as its
configurations for one node set them.
"""

import torch
from torch import Tensor
from torchspec.models.draft.auto import AutoEagle3DraftModel
from torchspec.models.eagle3 import Eagle3Model, compute_target_p_padded
from torchspec.training.optimizer import BF16Optimizer
from torchspec.utils.tensor import padding
from transformers import LlamaConfig

from benchmarks.train_step.adapters.hub import attention_of, drafter_settings
from benchmarks.train_step.cases import (
    CLIP_NORM,
    DECAY,
    RATE,
    ROPE_THETA,
    Case,
    Material,
    asked_at,
    rows_of,
)

FORMS = ("batch", "row")
NOTE = "no wrapper for ranks"
TRAINED_FOR = 1000
"""Optimizer steps the learning rate's schedule is told of."""


class Trainer:
    """Its drafter and optimizer, on the material's device."""

    def __init__(self, case: Case, material: Material) -> None:
        self.tensors, self.target_head = (
            (material.ids, material.taps, material.final),
            material.head,
        )
        attention = attention_of(material.device)
        config = LlamaConfig(**drafter_settings(case.sizes))
        # It reads the rotary settings by their older names; newer transformers renames them.
        config.rope_scaling, config.rope_theta = None, ROPE_THETA
        with torch.device(material.device):
            drafter = AutoEagle3DraftModel.from_config(
                config, attention_backend=attention, torch_dtype=material.dtype
            )
        with torch.no_grad():
            drafter.embed_tokens.weight.copy_(material.embedding)
            drafter.t2d.copy_(material.has_draft_id)
            drafter.d2t.copy_(material.offsets)
        drafter.freeze_embedding()
        self.model = Eagle3Model(drafter, length=case.steps, attention_backend=attention)
        self.optimizer = BF16Optimizer(
            drafter, lr=RATE, max_grad_norm=CLIP_NORM, total_steps=TRAINED_FOR
        )
        self.model.train()

    def load(self, case: Case) -> None:
        """Its batch: the mask is read at row t + k for row t's step k."""
        self.model.length = case.steps
        self.ids, self.taps, self.final = (rows_of(case, tensor) for tensor in self.tensors)
        self.mask = rows_of(case, asked_at(case, ahead=2).to(self.ids.device, torch.int64))

    def step(self) -> Tensor:
        """One optimizer step."""
        target = compute_target_p_padded(
            target_hidden_states=padding(self.final, left=False),
            target_lm_head_weight=self.target_head,
            t2d=self.model.draft_model.t2d,
            loss_mask=self.mask,
            length=self.model.length,
        )
        losses, _, _ = self.model(
            input_ids=padding(self.ids, left=False),
            attention_mask=torch.ones_like(self.ids),
            target=target,
            loss_mask=self.mask,
            hidden_states=self.taps,
        )
        loss = sum(DECAY**k * losses[k] for k in range(len(losses)))
        loss.backward()
        self.optimizer.step()
        return loss.detach()
