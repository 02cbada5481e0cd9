"""SpecForge 0.2.0: its offline EAGLE-3 step.

Its strategy, training core and optimizer are called as its own trainer does on one device with the
defaults of its settings (flex attention, target logits in full), but without the wrapper for
several ranks, which would only add work.
"""

import json
import tempfile
from pathlib import Path

import torch
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerCore
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor

from benchmarks.train_step.adapters.hub import attention_of, drafter_settings
from benchmarks.train_step.cases import CLIP_NORM, DECAY, RATE, Case, Material, asked_at, rows_of

FORMS = ("batch", "row")
NOTE = "no wrapper for ranks"
TRAINED_FOR = 1000
"""Optimizer steps the learning rate's schedule is told of."""


class Trainer:
    """Its drafter, target head and training core, on the material's device."""

    def __init__(self, case: Case, material: Material) -> None:
        self.ids, self.taps, self.final = material.ids, material.taps, material.final
        attention = attention_of(material.device)
        settings = drafter_settings(case.sizes) | {"tie_word_embeddings": False}
        with tempfile.TemporaryDirectory() as folder:
            config_file = Path(folder) / "config.json"
            config_file.write_text(json.dumps(settings), encoding="utf-8")
            with torch.device(material.device):
                config = AutoDraftModelConfig.from_file(str(config_file))
                drafter = AutoDraftModel.from_config(
                    config, torch_dtype=material.dtype, attention_backend=attention
                )
                head = TargetHead(folder)
        with torch.no_grad():
            head.to(material.dtype).fc.weight.copy_(material.head)
            drafter.embed_tokens.weight.copy_(material.embedding)
            drafter.t2d.copy_(material.has_draft_id)
            drafter.d2t.copy_(material.offsets)
        head.freeze_weights()
        drafter.freeze_embedding()
        self.model = OnlineEagle3Model(
            draft_model=drafter, length=case.steps, attention_backend=attention
        )
        backend = FSDPTrainingBackend(
            ParallelConfig(),
            optimizer_factory=lambda target: BF16Optimizer(
                target, lr=RATE, max_grad_norm=CLIP_NORM, total_steps=TRAINED_FOR
            ),
        )
        backend.prepare_model(self.model, wrap=False, optimizer_target=drafter)
        strategy = Eagle3TrainStrategy(self.model, target_head=head.eval(), ploss_decay=DECAY)
        self.core = TrainerCore(strategy, backend)
        self.model.train()

    def load(self, case: Case) -> None:
        """Its batch: the mask is read at row t + k for row t's step k."""
        self.model.length = case.steps
        ids = rows_of(case, self.ids)
        mask = asked_at(case, ahead=2).to(ids.device, torch.int64)
        self.batch = TrainBatch(
            sample_ids=[str(row) for row in range(len(ids))],
            strategy="eagle3",
            tensors={
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "loss_mask": rows_of(case, mask),
                "hidden_state": rows_of(case, self.taps),
                "target": rows_of(case, self.final),
            },
            metadata={"target_repr": "hidden_state"},
        )

    def step(self) -> Tensor:
        """One optimizer step; it reads its metrics back to the host each time."""
        return torch.as_tensor(self.core.train_step(self.batch).metrics["loss"])
