"""AdamW on float32 masters, shared out over ranks; nothing of a step waits for the host.

Each rank owns a part of every bucket: it gets the sum of that part's gradients, updates that part,
and sends the new weights to all. See docs/decisions/0006-shared-optimizer-state.md.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.draft.model import Drafter
from pipeline.draft.weights import BUCKETS, Weights, layout
from pipeline.kernels.adamw import adamw
from pipeline.training.buckets import Bucket
from pipeline.training.errors import CheckpointError
from pipeline.training.exchange import Pending, add_up, start_gather, start_sum
from pipeline.training.ranks import Ranks
from pipeline.training.reading import Reading

_EPSILON = 1e-8
_MOMENTS = ("exp_avg", "exp_avg_sq")
_BACKWARD = ("head", "down", "gate_up", "o", "qkv", "fc", "norms")
"""Buckets in the order in which a backward finishes their gradients."""
_FORWARD = ("norms", "fc", "qkv", "o", "gate_up", "down", "head")
"""Buckets in the order in which a forward reads them."""


class MasterAdamW:
    """The optimizer of one drafter on one rank.

    model: float32, on any device; its parameters move to the rank's device and become views of
    buffers in `dtype`, which it computes in. betas, weight_decay: as in AdamW (decoupled); norms
    are not decayed. reduce_dtype: of gradients between ranks; float32 or bfloat16.
    """

    def __init__(
        self,
        model: Drafter,
        *,
        dtype: torch.dtype,
        ranks: Ranks,
        betas: tuple[float, float],
        weight_decay: float,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        assert set(_BACKWARD) == set(_FORWARD) == set(BUCKETS)
        self._ranks, self._betas, self._reduce_dtype = ranks, betas, reduce_dtype
        self._decay = {bucket: weight_decay if bucket != "norms" else 0.0 for bucket in BUCKETS}
        self._buckets: dict[str, Bucket] = {}
        parameters = dict(model.named_parameters())
        for name, parts in layout(model.config).items():
            bucket = self._buckets[name] = Bucket(parts, dtype=dtype, ranks=ranks)
            bucket.set_weights({part: parameters[part].detach() for part, _ in parts})
            for part, view in bucket.named(bucket.weight).items():
                parameters.pop(part).data = view  # frees the model's own memory
        assert not parameters, f"in no bucket: {', '.join(parameters)}"
        self.weights = Weights(**{n: b.joined(b.weight) for n, b in self._buckets.items()})
        """Of the compute dtype; whole on every rank, but not between `step` and `settle`."""
        self.gradients = Weights(**{n: b.joined(b.gradient) for n, b in self._buckets.items()})
        """float32, this rank's share; scratch from the first `reduce` of a step to the next."""
        self.parameters = sum(math.prod(bucket.shape) for bucket in self._buckets.values())
        """Their number."""
        self.updates = 0
        self._final: set[str] = set()
        self._sums: list[Pending] = []
        self._gathers: list[Pending] | None = None

    def reduce(self, bucket: str) -> None:
        """Says that a bucket's gradient is final on this rank: its sum over ranks may start.

        Whatever the order of these calls, sums start in the same order on every rank.
        """
        self._final.add(bucket)
        if self._ranks.world == 1:
            return
        while (at := len(self._sums)) < len(_BACKWARD) and _BACKWARD[at] in self._final:
            gradient = self._buckets[_BACKWARD[at]].gradient
            self._sums.append(start_sum(gradient, ranks=self._ranks, dtype=self._reduce_dtype))

    def step(self, learning_rate: float, *, clip_norm: float, sums: Tensor) -> Reading:
        """Queues an update by the sum of all ranks' gradients.

        clip_norm: what that sum is clipped to (0: not at all). sums float64 [m] on the device: what
        else is to be added up over ranks, this rank's loss first. Gives float64 [1 + m], readable
        before the update is done: the gradient's norm before clipping, and the totals of sums. If
        norm or loss is not finite, nothing changes on any rank. `settle` comes next.
        """
        assert self._gathers is None, "the step before was not settled"
        for name in _BACKWARD:
            self.reduce(name)
        for pending in self._sums:
            pending.wait()
        self._final, self._sums = set(), []
        norms = [torch.linalg.vector_norm(b.own_gradient) for b in self._buckets.values()]
        squares = torch.stack(norms).double().square().sum()
        report = torch.cat([squares.view(1), sums])
        add_up(report, ranks=self._ranks)
        report[0].sqrt_()
        factor = (clip_norm / report[0]).clamp(max=1) if clip_norm else torch.ones_like(report[0])
        factor = (factor + 0 * report[:2].sum()).float()  # 0 * infinite is no number
        reading = Reading(report)
        self._gathers = []
        for name in _FORWARD:
            bucket = self._buckets[name]
            adamw(
                bucket.own_weight,
                bucket.master,
                bucket.own_gradient,
                bucket.first,
                bucket.second,
                rate=learning_rate,
                betas=self._betas,
                eps=_EPSILON,
                weight_decay=self._decay[name],
                step=self.updates + 1,
                factor=factor,
            )
            if self._ranks.world > 1:
                self._gathers.append(start_gather(bucket.weight, ranks=self._ranks))
        return reading

    def settle(self, *, updated: bool) -> None:
        """Lets what comes next use the new weights. updated: whether `step` gave finite numbers."""
        assert self._gathers is not None, "no step to settle"
        for pending in self._gathers:
            pending.wait()
        self._gathers = None
        self.updates += updated

    def norm(self) -> float:
        """Euclidean norm of this rank's gradient, before any `reduce`."""
        norms = [torch.linalg.vector_norm(b.gradient) for b in self._buckets.values()]
        return float(torch.stack(norms).double().norm())

    def mark(self) -> int:
        """A number that is the same on all ranks while their weights are, bit for bit."""
        integer = {2: torch.int16, 4: torch.int32}
        marks = [
            bucket.weight.view(integer[bucket.weight.itemsize]).sum(dtype=torch.int64)
            for bucket in self._buckets.values()
        ]
        return int(torch.stack(marks).sum())

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Masters by parameter name, and `<parameter>.<moment>` with `updates`; float32, int64.

        Called by all ranks: rank 0 gets them, whole, on the CPU; the others get nothing. Alone,
        they are not copied. Buckets travel one by one, in the gradient's memory.
        """
        model: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {"updates": torch.tensor(self.updates)}
        for bucket in self._buckets.values():
            tensors = (bucket.master, bucket.first, bucket.second)
            for kind, part in zip(("", *_MOMENTS), tensors, strict=True):
                for name, tensor in bucket.whole(part).items():
                    if self._ranks.rank == 0:
                        kept = tensor if self._ranks.world == 1 else tensor.to("cpu", copy=True)
                        (state if kind else model)[f"{name}.{kind}" if kind else name] = kept
        return (model, state) if self._ranks.rank == 0 else ({}, {})

    def restore(self, model: Mapping[str, Tensor], *, state: Mapping[str, Tensor]) -> None:
        """Takes back what `gather` gave to any number of ranks, exactly.

        CheckpointError when names, shapes or dtypes differ.
        """
        shapes = {n: t.shape for b in self._buckets.values() for n, t in b.named(b.weight).items()}
        moments = {f"{n}.{moment}": shape for n, shape in shapes.items() for moment in _MOMENTS}
        _same_tensors("model", model, wanted=shapes)
        _same_tensors("optimizer", state, wanted={**moments, "updates": torch.Size([])})
        for bucket in self._buckets.values():
            bucket.set_weights(model)
            for moment, part in zip(_MOMENTS, (bucket.first, bucket.second), strict=True):
                bucket.set_part(part, {name: state[f"{name}.{moment}"] for name in bucket.names})
        self.updates = int(state["updates"])


def _same_tensors(
    what: str, found: Mapping[str, Tensor], *, wanted: Mapping[str, torch.Size]
) -> None:
    different = sorted(found.keys() ^ wanted.keys()) or [
        f"{name} {list(found[name].shape)} {found[name].dtype}"
        for name, shape in wanted.items()
        if found[name].shape != shape
        or found[name].dtype != (torch.int64 if name == "updates" else torch.float32)
    ]
    if different:
        raise CheckpointError(
            f"checkpoint: {what} tensors differ: {', '.join(different[:5])}",
            wanted=f"the {len(wanted)} tensors of this drafter",
            next_step="resume with the settings that wrote it, or start over: make train",
        )
