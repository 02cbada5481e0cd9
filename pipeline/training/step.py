"""One optimizer step: every pack's share of the loss, one gradient over all ranks, one update."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeline.draft.model import Drafter
from pipeline.draft.ttt import Pack, PackLoss, StepMetrics, pack_loss
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.training.batches import PackReader, ReadyPack, move
from pipeline.training.errors import NonFinite, TrainingError
from pipeline.training.optimizer import MasterAdamW
from pipeline.training.packs import Indices
from pipeline.training.ranks import Ranks

_WEIGHT_TOLERANCE = 1e-6  # relative; both sides are float64 sums of the same powers of the decay


@dataclass(frozen=True, eq=False)
class Computation:
    """A drafter with the frozen tensors and the loss it is trained by, all on one device.

    embedding [V, H] in the target's dtype, teacher_head [D, H] in the compute dtype; steps, decay,
    kind: as in `pack_loss`.
    """

    model: Drafter
    embedding: Tensor
    teacher_head: Tensor
    vocabulary: DraftVocabulary
    steps: int
    decay: float
    kind: Literal["kl", "tv"]

    def loss(self, pack: Pack) -> PackLoss:
        """Weighted loss sum of one pack, moved to the device first."""
        return pack_loss(
            self.model,
            move(pack, self.embedding.device),
            embedding=self.embedding,
            teacher_head=self.teacher_head,
            draft_vocabulary=self.vocabulary,
            steps=self.steps,
            decay=self.decay,
            kind=self.kind,
        )


@dataclass(frozen=True)
class StepResult:
    """loss: weighted mean over the step's supervised pairs. gradient_norm: before clipping.

    tokens: of all ranks. updated: false when nothing was supervised, and nothing changed.
    """

    loss: float
    weight: float
    tokens: int
    metrics: StepMetrics
    gradient_norm: float
    updated: bool


class _Sums:
    """What one rank adds up in a step; every rank gets the same totals."""

    def __init__(self, steps: int) -> None:
        self.metrics = StepMetrics.zeros(steps)
        self.loss = self.weight = self.planned = 0.0
        self.tokens = 0

    def over(self, ranks: Ranks) -> None:
        """Replaces the sums by those over all ranks."""
        scalars = [self.loss, self.weight, float(self.tokens), self.planned]
        mine = torch.cat(
            [torch.tensor(scalars, dtype=torch.float64), self.metrics.to_tensor().flatten()]
        )
        total = ranks.sum(mine)
        self.loss, self.weight, tokens, self.planned = total[:4].tolist()
        self.tokens = round(tokens)
        self.metrics = StepMetrics.from_tensor(total[4:].view(5, -1))


def run_step(
    computation: Computation,
    optimizer: MasterAdamW,
    *,
    step: int,
    mine: list[Indices],
    packs: Iterator[ReadyPack],
    reader: PackReader,
    ranks: Ranks,
    learning_rate: float,
    clip_norm: float,
) -> StepResult:
    """Works through this rank's packs of step 1.. and updates the weights once.

    mine: their samples, in order; packs: the same packs, made. The loss is divided by the weight of
    the whole step, known from masks alone, so how packs are dealt to ranks and slices changes
    nothing. NonFinite (weights untouched) names the pack; an error on any rank stops all.
    """
    optimizer.zero()
    sums = _Sums(computation.steps)

    def work() -> None:
        step_weight = 0.0
        for number, samples in enumerate(mine):
            ready = next(packs)
            assert ready.samples.tolist() == samples.tolist()
            if number == 0:
                assert ready.step_weight is not None
                step_weight = ready.step_weight
                sums.planned = step_weight if ranks.rank == 0 else 0.0
            result = computation.loss(ready.pack)
            value = float(result.loss.detach())
            if not math.isfinite(value):
                raise _not_finite(f"loss {value}", step, reader.names(samples, most=20))
            if step_weight > 0 and result.loss.requires_grad:
                (result.loss / step_weight).backward()  # type: ignore[no-untyped-call]
                optimizer.collect()
            sums.loss += value
            sums.weight += result.weight
            sums.tokens += len(ready.pack.ids)
            sums.metrics += result.metrics

    ranks.together(work, doing=f"step {step}, samples {_named(mine, reader)}")
    sums.over(ranks)
    if abs(sums.weight - sums.planned) > _WEIGHT_TOLERANCE * max(1.0, sums.planned):
        raise TrainingError(
            f"step {step}: loss over a weight of {sums.weight}, masks of its plan {sums.planned}",
            wanted="the same pairs in plan and loss",
            next_step="this is a fault of the trainer: please report it",
        )
    if sums.weight == 0:
        # Even a zero gradient would move the weights, by momentum and weight decay.
        return StepResult(0.0, 0.0, sums.tokens, sums.metrics, 0.0, False)
    ranks.sum_gradients(optimizer.gradient)
    norm = optimizer.norm()
    if not math.isfinite(norm):
        culprit = _find_culprit(
            computation, optimizer, step=step, mine=mine, reader=reader, weight=sums.weight
        )
        ranks.agree(culprit)
        raise _not_finite(f"gradient norm {norm}", step, "(every pack alone is finite)")
    optimizer.step(learning_rate, norm=norm, clip_norm=clip_norm)
    loss = sums.loss / sums.weight
    return StepResult(loss, sums.weight, sums.tokens, sums.metrics, norm, True)


def _find_culprit(
    computation: Computation,
    optimizer: MasterAdamW,
    *,
    step: int,
    mine: list[Indices],
    reader: PackReader,
    weight: float,
) -> NonFinite | None:
    """Repeats this rank's packs one by one; the first whose gradient alone is not finite."""
    for samples in mine:
        optimizer.zero()
        result = computation.loss(reader.read(samples))
        if result.loss.requires_grad:
            (result.loss / weight).backward()  # type: ignore[no-untyped-call]
            optimizer.collect()
        norm = optimizer.norm()
        if not math.isfinite(norm):
            return _not_finite(f"gradient norm {norm}", step, reader.names(samples, most=20))
    return None


def _named(mine: list[Indices], reader: PackReader) -> str:
    return reader.names(mine[0], most=3) + " ..." if mine else "(none on this rank)"


def _not_finite(what: str, step: int, names: str) -> NonFinite:
    return NonFinite(
        f"step {step}: {what} in the pack of samples {names}",
        wanted="finite loss and gradient; the weights were not touched",
        next_step="check these samples' states (make verify), or lower the learning rate and "
        "continue from the last checkpoint: make train RESUME=1",
    )
