"""speculators 0.9.0: its EAGLE-3 model, loss, collation and optimizer, called as its trainer does.

It keeps float32 weights and computes in bfloat16 by autocast. Its drafter's head stays frozen, as
it ships, so it does less work than the others here: the head has no gradient and no moments.
"""

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from torch import Tensor
from transformers import LlamaConfig, get_linear_schedule_with_warmup

from benchmarks.train_step.adapters.hub import attention_of, drafter_settings
from benchmarks.train_step.cases import DECAY, RATE, TAPS, Case, Material, asked_at

FORMS = ("pack",)
NOTE = "its head is frozen"
CLIP_NORM = 1.0
"""Its own, not a setting."""
TRAINED_FOR = 1000
"""Optimizer steps the learning rate's schedule is told of."""


class Trainer:
    """Its drafter and optimizers, on the material's device."""

    def __init__(self, case: Case, material: Material) -> None:
        shape, self.device, self.dtype = case.sizes, material.device, material.dtype
        # Samples lie on the host until they are collated, as its loader leaves them.
        self.ids, self.taps = material.ids.cpu(), material.taps.cpu()
        self.final = material.final.cpu()
        layer = LlamaConfig(**drafter_settings(shape))
        layer._attn_implementation = attention_of(material.device, flex="simple_flex_attention")
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=shape.D,
            eagle_aux_hidden_state_layer_ids=list(TAPS),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case.steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        with torch.device(material.device):
            self.model = Eagle3DraftModel(config)
        self.model.load_vocab_mappings(material.has_draft_id, material.offsets)
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(material.embedding)
            for head in (self.model.lm_head, self.model.verifier_lm_head):
                head.weight.copy_(material.head[material.kept])
        self.model.to(material.device)
        self.settings = TrainerConfig(lr=RATE, num_epochs=1, save_path="")
        self.optimizers = build_optimizers(self.model, self.settings)
        self.schedules = [
            get_linear_schedule_with_warmup(optimizer, TRAINED_FOR // 100, TRAINED_FOR)
            for optimizer in self.optimizers
        ]
        self.model.train()

    def load(self, case: Case) -> None:
        """Its batch: one row of documents, made by its collation from one sample a document."""
        mask = asked_at(case, ahead=1)
        samples = [
            {
                "input_ids": self.ids[at : at + case.document],
                "hidden_states": self.taps[at : at + case.document],
                "verifier_last_hidden_states": self.final[at : at + case.document],
                "loss_mask": mask[at : at + case.document],
                "lengths": torch.tensor([case.document]),
                "position_ids": torch.arange(case.document),
            }
            for at in range(0, case.tokens, case.document)
        ]
        collate = CollateFn(
            case.tokens, case.sizes.H, len(TAPS), dtype=self.dtype, preprocess=shift_batch
        )
        batch = collate(samples)
        self.batch = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
            if not name.startswith("__")
        }
        self.options, _ = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div",
            loss_implementation="fused" if self.device.type == "cuda" else "eager",
            ttt_steps=case.steps,
            ttt_step_loss_decay=DECAY,
        )

    def step(self) -> Tensor:
        """One optimizer step, in its trainer's order."""
        with torch.autocast(self.device.type, dtype=self.settings.hidden_states_dtype):
            _, loss, _ = self.model(**self.batch, **self.options)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        return loss.detach()
