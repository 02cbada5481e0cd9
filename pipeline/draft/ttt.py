"""The training-time test: weighted loss of a drafter over one pack, its metrics and gradient.

Labels (B13): row t at step k is asked for ids[t + 2 + k]; it counts when that label is supervised
and lies in the same document. `supervised` is therefore never shifted by the caller.

Forward and backward are written out (`forward.py`, `backward.py`): what one row needs is known, so
each TTT step computes its live rows into one stack, and every weight's gradient is one product
over the whole stack, summed in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pipeline.draft.backward import backward
from pipeline.draft.chain import ChainPlan, plan_chains
from pipeline.draft.config import DrafterConfig
from pipeline.draft.errors import PackError
from pipeline.draft.forward import forward
from pipeline.draft.loss import head_loss
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.draft.weights import Weights
from pipeline.kernels.judge import LossKind


@dataclass(frozen=True, eq=False)
class Pack:
    """Whole samples laid end to end, of which only what the plan reads is held; on one device.

    ids int64 [T]. taps [N, 3 * Ht]: low to high, of plan.keys. final [S, Ht]: after the target's
    final norm, of plan.teachers. Both in the compute dtype.
    """

    plan: ChainPlan
    ids: Tensor
    taps: Tensor
    final: Tensor

    @classmethod
    def of(
        cls,
        *,
        ids: Tensor,
        taps: Tensor,
        final: Tensor,
        supervised: Tensor,
        document: Tensor,
        steps: int,
        decay: float,
    ) -> Self:
        """The pack of whole tensors: ids [T], taps [T, 3 * Ht], final [T, Ht], on one device.

        supervised bool [T], by token; document int64 [T], rising. PackError when lengths differ.
        """
        named = {"taps": taps, "final": final, "supervised": supervised, "document": document}
        for name, tensor in named.items():
            if len(tensor) != len(ids):
                raise _misfit(len(ids), name, tensor, wanted=f"{len(ids)} rows")
        plan = plan_chains(supervised.cpu(), document.cpu(), steps=steps, decay=decay)
        plan = plan.to(ids.device)
        return cls(plan, ids, taps[plan.keys], final[plan.teachers])


@dataclass(frozen=True, eq=False)
class Frozen:
    """What training reads and never changes, on one device.

    embedding [V, H]: the target's, in any float dtype. teacher_head [D, Ht]: the target head's rows
    of the draft vocabulary, in the compute dtype. draft_ids int64 [V]: draft id of each target
    token, -1 where it has none.
    """

    embedding: Tensor
    teacher_head: Tensor
    draft_ids: Tensor

    @classmethod
    def of(cls, embedding: Tensor, teacher_head: Tensor, vocabulary: DraftVocabulary) -> Self:
        """With the map of a draft vocabulary, on the embedding's device."""
        return cls(embedding, teacher_head, vocabulary.draft_ids().to(embedding.device))


@dataclass(frozen=True)
class StepMetrics:
    """Sums per TTT step, each float64 [K] on the CPU; add packs (or ranks) with `+`.

    count: supervised (row, step) pairs. correct: drafter's argmax in target ids is the label.
    overlap: sum over pairs of sum-min(p, q). outside: labels outside the draft vocabulary.
    loss: unweighted loss sum.
    """

    count: Tensor
    correct: Tensor
    overlap: Tensor
    outside: Tensor
    loss: Tensor

    def __add__(self, other: "StepMetrics") -> "StepMetrics":
        return StepMetrics.from_tensor(self.to_tensor() + other.to_tensor())

    @classmethod
    def zeros(cls, steps: int) -> "StepMetrics":
        """Nothing counted yet, for `steps` TTT steps."""
        return cls.from_tensor(torch.zeros(5, steps, dtype=torch.float64))

    def to_tensor(self) -> Tensor:
        """float64 [5, K], in field order: one buffer to all-reduce."""
        return torch.stack([self.count, self.correct, self.overlap, self.outside, self.loss])

    @classmethod
    def from_tensor(cls, rows: Tensor) -> "StepMetrics":
        """Inverse of `to_tensor`."""
        return cls(*rows.unbind(0))


@dataclass(frozen=True, eq=False)
class PackLoss:
    """What one pack gave; nothing here was waited for.

    loss: scalar, wide, the weighted SUM over asked pairs, on the pack's device. weight: sum of the
    weights. sums: float64 [5, K] on the device, rows as the fields of `StepMetrics`.
    """

    loss: Tensor
    weight: float
    sums: Tensor

    @property
    def metrics(self) -> StepMetrics:
        """The sums on the CPU: waits for the device."""
        return StepMetrics.from_tensor(self.sums.cpu())


def pack_loss(
    weights: Weights,
    pack: Pack,
    *,
    config: DrafterConfig,
    frozen: Frozen,
    kind: LossKind = "kl",
    gradients: Weights | None = None,
    scale: float = 1.0,
    fresh: bool = False,
    finished: Callable[[str], None] | None = None,
) -> PackLoss:
    """Weighted loss sum over `pack`, exact in the chain-sparse form, and optionally its gradient.

    weights: their dtype is the compute dtype; taps, final and the teacher head have it too. Losses
    are float32 or wider. gradients (float32 or wider): `scale` times the gradient is added, or
    written when `fresh`, whatever was in it. finished is told each bucket's name once, as soon as
    its gradient is queued: head, down, gate_up, o, qkv, fc, norms. Errors: PackError.
    """
    _check(weights, pack, config, frozen)
    if gradients is not None and fresh:
        gradients.norms.zero_()  # the others are written by their first product
    told = finished or (lambda _bucket: None)
    plan, device = pack.plan, pack.ids.device
    K = len(plan.counts)
    wide = torch.promote_types(weights.head.dtype, torch.float32)
    with torch.no_grad():
        if not plan.steps:
            if gradients is not None:
                if fresh:
                    gradients.zero_()
                for bucket in ("head", "down", "gate_up", "o", "qkv", "fc", "norms"):
                    told(bucket)
            sums = torch.zeros(5, K, dtype=torch.float64, device=device)
            return PackLoss(torch.zeros((), dtype=wide, device=device), 0.0, sums)
        states = forward(
            weights, config, plan, ids=pack.ids, taps=pack.taps, embedding=frozen.embedding
        )
        sums, slopes = head_loss(
            weights,
            states.output,
            plan,
            eps=config.rms_norm_eps,
            final=pack.final,
            teacher_head=frozen.teacher_head,
            labels=frozen.draft_ids[pack.ids[plan.label]],
            kind=kind,
            gradients=gradients,
            scale=scale,
            fresh=fresh,
        )
        decays = plan.decay ** torch.arange(K, dtype=torch.float64, device=device)
        loss = (sums[4] @ decays).to(wide)
        if gradients is not None and slopes is not None:
            told("head")
            backward(
                weights, config, plan, states,
                taps=pack.taps, slopes=slopes, gradients=gradients, fresh=fresh, finished=told,
            )  # fmt: skip
    return PackLoss(loss, plan.weight, sums)


def _check(weights: Weights, pack: Pack, config: DrafterConfig, frozen: Frozen) -> None:
    """PackError unless all sizes fit the drafter's config."""
    H, D, V = config.hidden_size, config.draft_vocabulary_size, config.target_vocabulary_size
    plan = pack.plan
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "ids": (pack.ids, (plan.rows,)),
        "taps": (pack.taps, (len(plan.keys), len(config.taps) * H)),
        "final": (pack.final, (len(plan.teachers), H)),
        "embedding": (frozen.embedding, (V, H)),
        "teacher_head": (frozen.teacher_head, (D, H)),
        "draft_ids": (frozen.draft_ids, (V,)),
        "head": (weights.head, (D, H)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise _misfit(plan.rows, name, tensor, wanted=f"{list(shape)}")
    compute = weights.head.dtype
    for name in ("taps", "final", "teacher_head"):
        tensor = wanted[name][0]
        if tensor.dtype != compute:
            raise _misfit(plan.rows, name, tensor, wanted=f"the weights' dtype, {compute}")


def _misfit(rows: int, name: str, tensor: Tensor, *, wanted: str) -> PackError:
    return PackError(
        f"pack of {rows} rows with {name} {list(tensor.shape)} of {tensor.dtype}",
        wanted=wanted,
        next_step="make the pack from states of the drafter's own target: make extract",
    )
