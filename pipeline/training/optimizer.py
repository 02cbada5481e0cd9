"""AdamW on float32 masters, with the gradients of an optimizer step in one flat buffer.

When the model computes in float32 its parameters are the masters; in bfloat16 the masters are
copies, and gradients are added up in float32, because sums of many packs lose bits in bfloat16.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeline.training.errors import CheckpointError

_EPSILON = 1e-8
_MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterAdamW:
    """The optimizer of one drafter.

    model: float32; it computes in `dtype` afterwards, and its float32 values become the masters.
    betas, weight_decay: as in AdamW (decoupled); norms and other vectors are not decayed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        masters = {n: p.detach().to(torch.float32) for n, p in model.named_parameters()}
        model.to(dtype)
        self._parameters = dict(model.named_parameters())
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        device = next(iter(self._parameters.values())).device
        self.gradient = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        """float32 [number of parameters]: what is summed over ranks, in parameter order."""
        pieces = torch.split(self.gradient, sizes)
        self.masters: dict[str, Tensor] = {}
        self._shares: dict[str, Tensor] = {}
        for (name, parameter), piece in zip(self._parameters.items(), pieces, strict=True):
            self._shares[name] = piece.view_as(parameter)
            if parameter.dtype == torch.float32:
                self.masters[name] = parameter
                parameter.grad = self._shares[name]
            else:
                self.masters[name] = masters[name].requires_grad_(True)
                self.masters[name].grad = self._shares[name]
        flat = [master for master in self.masters.values() if master.ndim < 2]
        matrices = [master for master in self.masters.values() if master.ndim >= 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": weight_decay},
                {"params": flat, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=betas,
            eps=_EPSILON,
            fused=device.type == "cuda",  # one pass over masters and moments instead of many
        )
        self.updates = 0

    def zero(self) -> None:
        """Starts an optimizer step: no gradient yet."""
        self.gradient.zero_()
        for parameter in self._parameters.values():
            if parameter.dtype != torch.float32:
                parameter.grad = None

    def collect(self) -> None:
        """Adds what the last backward left in the model to the buffer; after every pack."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None or parameter.grad is self._shares[name]:
                continue
            self._shares[name].add_(parameter.grad)
            # A float32 parameter accumulates in the buffer itself, so its grad is never replaced.
            assert parameter.dtype != torch.float32, f"{name}: its gradient left the buffer"
            parameter.grad = None

    def norm(self) -> float:
        """Euclidean norm of the gradient; infinite or NaN when any part is."""
        return float(torch.linalg.vector_norm(self.gradient))

    def step(self, learning_rate: float, *, norm: float, clip_norm: float) -> None:
        """Clips the gradient to clip_norm (0: not at all) and updates masters and model."""
        if 0 < clip_norm < norm:
            self.gradient.mul_(clip_norm / norm)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.updates += 1
        self._publish()

    def model_tensors(self) -> dict[str, Tensor]:
        """float32 masters by parameter name, detached, not copied."""
        return {name: master.detach() for name, master in self.masters.items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments by `<parameter>.<moment>`, float32, and `updates`, int64; empty moments are 0."""
        tensors = {"updates": torch.tensor(self.updates)}
        for name, master in self.masters.items():
            state = self._adam.state.get(master, {})
            for moment in _MOMENTS:
                held = state.get(moment)
                tensors[f"{name}.{moment}"] = torch.zeros_like(master) if held is None else held
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def restore(self, model: Mapping[str, Tensor], *, state: Mapping[str, Tensor]) -> None:
        """Takes masters and moments back, exactly. CheckpointError when names or shapes differ."""
        _same_tensors("model", model, wanted=self.model_tensors())
        _same_tensors("optimizer", state, wanted=self.state_tensors())
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(model[name])
        self._publish()
        self.updates = int(state["updates"])
        numbered = [p for group in self._adam.param_groups for p in group["params"]]
        names = {id(master): name for name, master in self.masters.items()}
        moments = {
            index: {
                "step": torch.tensor(float(self.updates)),
                **{moment: state[f"{names[id(p)]}.{moment}"].clone() for moment in _MOMENTS},
            }
            for index, p in enumerate(numbered)
        }
        self._adam.load_state_dict(
            {"state": moments, "param_groups": self._adam.state_dict()["param_groups"]}
        )

    def _publish(self) -> None:
        """Copies masters into a model that computes in another dtype."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not self.masters[name]:
                    parameter.copy_(self.masters[name])


def _same_tensors(what: str, found: Mapping[str, Tensor], *, wanted: Mapping[str, Tensor]) -> None:
    different = sorted(found.keys() ^ wanted.keys()) or [
        f"{name} {list(found[name].shape)} {found[name].dtype}"
        for name in wanted
        if found[name].shape != wanted[name].shape or found[name].dtype != wanted[name].dtype
    ]
    if different:
        raise CheckpointError(
            f"checkpoint: {what} tensors differ: {', '.join(different[:5])}",
            wanted=f"the {len(wanted)} tensors of this drafter",
            next_step="resume with the settings that wrote it, or start over: make train",
        )
