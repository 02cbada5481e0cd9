"""One optimizer step: every pack's share of the loss, one gradient over all ranks, one update."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.draft.model import Drafter
from pipeline.draft.ttt import Frozen, Pack, PackLoss, StepMetrics, pack_loss
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.draft.weights import Weights
from pipeline.kernels.judge import LossKind
from pipeline.training.batches import PackReader, ReadyPack
from pipeline.training.errors import NonFinite, TrainingError
from pipeline.training.optimizer import MasterAdamW
from pipeline.training.packs import Indices
from pipeline.training.ranks import Ranks

_WEIGHT_TOLERANCE = 1e-6  # relative; both sides are float64 sums of the same powers of the decay


@dataclass(frozen=True, eq=False)
class Computation:
    """A drafter with the frozen tensors and the loss it is trained by, all on one device.

    weights: the optimizer's, of which the model's parameters are views. steps: K. kind: as in
    `pack_loss`.
    """

    model: Drafter
    weights: Weights
    frozen: Frozen
    vocabulary: DraftVocabulary
    steps: int
    kind: LossKind

    def loss(
        self,
        pack: Pack,
        *,
        gradients: Weights | None = None,
        scale: float = 1.0,
        fresh: bool = False,
        finished: Callable[[str], None] | None = None,
    ) -> PackLoss:
        """Weighted loss sum of one pack on the device, and its gradient: see `pack_loss`."""
        return pack_loss(
            self.weights,
            pack,
            config=self.model.config,
            frozen=self.frozen,
            kind=self.kind,
            gradients=gradients,
            scale=scale,
            fresh=fresh,
            finished=finished,
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


class _Share:
    """What one rank's packs of a step give. losses: one scalar a pack, on the device, like sums."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.losses: list[Tensor] = []
        self.sums = torch.zeros(5, steps, dtype=torch.float64, device=device)
        self.weight = self.planned = 0.0
        self.tokens = 0

    def add(self, pack: Pack, result: PackLoss) -> None:
        self.losses.append(result.loss.double())
        self.sums += result.sums
        self.weight += result.weight
        self.tokens += len(pack.ids)

    def to_add_up(self) -> Tensor:
        """Loss, then sums, float64 [1 + 5K] on the device."""
        loss = torch.stack([self.sums.new_zeros(()), *self.losses]).sum()
        return torch.cat([loss.view(1), self.sums.flatten()])

    def totals(self, step: int, ranks: Ranks) -> tuple[float, int]:
        """Weight and tokens over all ranks; TrainingError when the weight is not the plan's."""
        mine = [self.weight, self.planned, float(self.tokens)]
        weight, planned, tokens = ranks.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
        if abs(weight - planned) > _WEIGHT_TOLERANCE * max(1.0, planned):
            raise TrainingError(
                f"step {step}: loss over a weight of {weight}, masks of its plan {planned}",
                wanted="the same pairs in plan and loss",
                next_step="this is a fault of the trainer: please report it",
            )
        return weight, round(tokens)


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

    The host waits once, for loss and norm; the device updates the weights meanwhile.
    """
    share = _Share(computation.steps, ranks.device)
    ranks.together(
        lambda: _accumulate(computation, optimizer, share, mine=mine, packs=packs, ranks=ranks),
        doing=f"step {step}, samples {_named(mine, reader)}",
    )
    weight, tokens = share.totals(step, ranks)
    if weight == 0:
        # Even a zero gradient would move the weights, by momentum and weight decay.
        metrics = StepMetrics.zeros(computation.steps)
        return StepResult(0.0, 0.0, tokens, metrics, 0.0, False)
    report = optimizer.step(learning_rate, clip_norm=clip_norm, sums=share.to_add_up()).wait()
    norm, loss = report[:2].tolist()
    finite = math.isfinite(norm) and math.isfinite(loss)
    optimizer.settle(updated=finite)
    if not finite:
        losses = [float(loss) for loss in share.losses]

        def find() -> None:
            _find_bad_loss(step, losses=losses, mine=mine, reader=reader)
            if math.isfinite(loss):
                _find_bad_gradient(
                    computation, optimizer, step=step, mine=mine, reader=reader, weight=weight
                )

        ranks.together(find, doing=f"step {step}, looking for what is not finite")
        raise _not_finite(f"gradient norm {norm}", step, "(every pack alone is finite)")
    metrics = StepMetrics.from_tensor(report[2:].view(5, -1))
    return StepResult(loss / weight, weight, tokens, metrics, norm, True)


def _accumulate(
    computation: Computation,
    optimizer: MasterAdamW,
    share: _Share,
    *,
    mine: list[Indices],
    packs: Iterator[ReadyPack],
    ranks: Ranks,
) -> None:
    """Queues all packs; sums over ranks start while the last one's backward is still running.

    Before the first of them, ranks agree that all have got so far: a rank that failed to read or to
    compute never leaves a peer with a sum that cannot end.
    """
    agreed = False

    def agree() -> None:
        nonlocal agreed
        if not agreed:
            agreed = True
            ranks.agree(None)

    def finished(bucket: str) -> None:
        agree()
        optimizer.reduce(bucket)

    step_weight = 0.0
    for number, samples in enumerate(mine):
        ready = next(packs)
        assert ready.samples.tolist() == samples.tolist()
        if number == 0:
            assert ready.step_weight is not None
            step_weight = ready.step_weight
            share.planned = step_weight if ranks.rank == 0 else 0.0
        result = computation.loss(
            ready.pack,
            gradients=optimizer.gradients if step_weight > 0 else None,
            scale=1 / step_weight if step_weight > 0 else 0.0,
            fresh=number == 0,
            finished=finished if number == len(mine) - 1 else None,
        )
        share.add(ready.pack, result)
    if not mine:
        optimizer.gradients.zero_()
    agree()


def _find_bad_loss(
    step: int, *, losses: list[float], mine: list[Indices], reader: PackReader
) -> None:
    """NonFinite, naming the first of this rank's packs whose loss is not finite."""
    for samples, loss in zip(mine, losses, strict=True):
        if not math.isfinite(loss):
            raise _not_finite(f"loss {loss}", step, reader.names(samples, most=20))


def _find_bad_gradient(
    computation: Computation,
    optimizer: MasterAdamW,
    *,
    step: int,
    mine: list[Indices],
    reader: PackReader,
    weight: float,
) -> None:
    """Repeats this rank's packs; NonFinite, naming the first whose own gradient is not finite."""
    for samples in mine:
        computation.loss(
            reader.read(samples), gradients=optimizer.gradients, scale=1 / weight, fresh=True
        )
        norm = optimizer.norm()
        if not math.isfinite(norm):
            raise _not_finite(f"gradient norm {norm}", step, reader.names(samples, most=20))


def _named(mine: list[Indices], reader: PackReader) -> str:
    return reader.names(mine[0], most=3) + " ..." if mine else "(none on this rank)"


def _not_finite(what: str, step: int, names: str) -> NonFinite:
    return NonFinite(
        f"step {step}: {what} in the pack of samples {names}",
        wanted="finite loss and gradient; the weights were not touched",
        next_step="check these samples' states (make verify), or lower the learning rate and "
        "continue from the last checkpoint: make train RESUME=1",
    )
