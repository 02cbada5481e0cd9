"""This trainer: loss and gradient of one pack, then the optimizer's update.

What its reader makes beside the device (the plan of rows, the choice of the states that are read)
is made once a case, as `benchmarks/loader` measures it.
"""

import torch
from torch import Tensor

from benchmarks.train_step.cases import (
    CLIP_NORM,
    DECAY,
    RATE,
    RMS_EPS,
    ROPE_THETA,
    TAPS,
    Case,
    Material,
    masks,
)
from pipeline.draft.config import DrafterConfig
from pipeline.draft.model import Drafter
from pipeline.draft.ttt import Frozen, Pack, pack_loss
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.training.optimizer import MasterAdamW
from pipeline.training.ranks import Ranks

FORMS = ("pack",)
NOTE = ""
DISTRIBUTION = None
"""Not installed: this checkout."""
BETAS = (0.9, 0.999)


class Trainer:
    """The drafter with its frozen tensors and optimizer, on the material's device.

    ranks: of a step that several processes share, each with a pack of its own.
    """

    def __init__(
        self,
        case: Case,
        material: Material,
        *,
        ranks: Ranks | None = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        shape, device = case.sizes, material.device
        # Whole states stay off the device, as a sample's rows that nothing reads do in training.
        self.ids, self.taps, self.final = material.ids, material.taps.cpu(), material.final.cpu()
        self.config = DrafterConfig(
            hidden_size=shape.H,
            target_hidden_size=shape.H,
            intermediate_size=shape.I,
            heads=shape.heads,
            kv_heads=shape.kv,
            head_dim=shape.d,
            draft_vocabulary_size=shape.D,
            target_vocabulary_size=shape.V,
            rope_theta=ROPE_THETA,
            rope_scaling=None,
            rms_norm_eps=RMS_EPS,
            max_position_embeddings=32768,
            norm_output=False,
            taps=TAPS,
        )
        head = material.head[material.kept]
        vocabulary = DraftVocabulary(material.offsets.cpu(), material.has_draft_id.cpu())
        self.frozen = Frozen.of(material.embedding, head, vocabulary)
        model = Drafter.initialised(self.config, head_rows=head.float().cpu(), seed=case.seed)
        self.ranks = ranks or Ranks(rank=0, world=1, device=device)
        self.optimizer = MasterAdamW(
            model,
            dtype=material.dtype,
            ranks=self.ranks,
            betas=BETAS,
            weight_decay=0.01,
            reduce_dtype=reduce_dtype,
        )

    def load(self, case: Case) -> None:
        """Its pack: all documents in one row, of which it holds what is read."""
        supervised, document = masks(case)
        self.pack = Pack.of(
            ids=self.ids,
            taps=self.taps.to(self.ids.device),
            final=self.final.to(self.ids.device),
            supervised=supervised,
            document=document,
            steps=case.steps,
            decay=DECAY,
        )

    def step(self) -> Tensor:
        """One optimizer step; it reads loss and norm back to the host, as its loop does."""
        optimizer, weight = self.optimizer, self.pack.plan.weight * self.ranks.world
        result = pack_loss(
            optimizer.weights,
            self.pack,
            config=self.config,
            frozen=self.frozen,
            gradients=optimizer.gradients,
            scale=1 / weight,
            fresh=True,
            finished=optimizer.reduce,
        )
        sums = torch.cat([result.loss.double().view(1), result.sums.flatten()])
        report = optimizer.step(RATE, clip_norm=CLIP_NORM, sums=sums).wait()
        optimizer.settle(updated=bool(torch.isfinite(report[:2]).all()))
        return report[1] / weight
