"""The weight of the target's final norm, from its safetensors: what tells a normed final state."""

from pathlib import Path

import torch
from torch import Tensor

from pipeline.adoption.errors import AdoptionError
from pipeline.target.layout import read_config, read_layout
from pipeline.target.tensors import read_tensor

_NAMES = (
    "model.norm.weight",
    "language_model.model.norm.weight",
    "model.language_model.norm.weight",
    "model.language_model.model.norm.weight",
    "language_model.norm.weight",
    "norm.weight",
)
_SMALLEST = 1e-4  # a channel that is scaled away says nothing when it is scaled back


def read_norm(folder: Path, *, hidden_size: int) -> Tensor:
    """The weight that a normed row is multiplied by, float32 [H].

    AdoptionError when the target has no plain RMS norm under a known name: whether its final states
    are normed could then not be proven. TensorError when the norm cannot be read.
    """
    layout = read_layout(folder)
    names = [name for name in _NAMES if name in layout.tensors]
    if len(names) != 1 or names[0].replace("weight", "bias") in layout.tensors:
        raise _refused(folder, f"{len(names)} final norms of the kind that is known here")
    weight = read_tensor(layout.tensors[names[0]], names[0]).float()
    if str(read_config(folder).get("model_type", "")).startswith("gemma"):
        weight = weight + 1.0  # Gemma stores what is added to 1
    if weight.shape != (hidden_size,) or not bool((weight.abs() > _SMALLEST).all()):
        raise _refused(folder, f"{names[0]} of shape {list(weight.shape)}, or with zeros in it")
    return torch.clone(weight)


def _refused(folder: Path, found: str) -> AdoptionError:
    return AdoptionError(
        f"{folder}: {found}",
        wanted=f"one RMS norm with a weight of every channel: {', '.join(_NAMES)}",
        next_step="such a target's states cannot be adopted: make extract",
    )
