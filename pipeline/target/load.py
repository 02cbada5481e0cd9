"""Loading a target as a transformers model, and finding its parts by name."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pipeline.target.errors import FolderError
from pipeline.target.facts import read_facts
from pipeline.target.layout import read_layout
from pipeline.target.tokenizer import brings_code, require_code_allowed

# Where the decoder (the module with `layers` and `norm`) lies in a causal model.
_DECODER_PATHS = (
    "model",
    "model.language_model",
    "language_model.model",
    "model.language_model.model",
    "language_model",
)
_HEAD_PATHS = ("lm_head", "language_model.lm_head", "model.lm_head")


def load_target(folder: Path, *, dtype: torch.dtype, device: str, remote_code: bool = False) -> Any:
    """The folder's causal model in evaluation mode, without gradients, local files only.

    RemoteCodeRefused when it brings its own code and that is not allowed. FolderError when it
    cannot be loaded, or a weight would have to be initialised or is left over: transformers only
    warns of those.
    """
    layout = read_layout(folder)
    read_facts(folder)  # sizes that no model has would be built for hours
    own_code = brings_code(folder, key="AutoModelForCausalLM") or brings_code(
        folder, key="AutoConfig"
    )
    if own_code:
        require_code_allowed(folder, remote_code=remote_code, what="model")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=own_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    # transformers raises bare exceptions of many kinds for a folder that it cannot read.
    except Exception as error:
        raise FolderError(
            f"{folder}: {type(error).__name__}: {error}",
            wanted="a causal model that transformers can load",
            next_step="check the target's folder in the profile",
        ) from error
    faults = {
        kind: sorted(map(str, loading.get(kind) or ()))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if any(faults.values()):
        shown = "; ".join(f"{kind}: {names[:3]}" for kind, names in faults.items() if names)
        raise FolderError(
            f"{folder}: {shown}",
            wanted=f"exactly the {len(layout.tensors)} stored tensors used, none initialised",
            next_step="check that weights and config.json belong together",
        )
    return model.requires_grad_(False).to(device).eval()


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The key-value cache as an argument of the model's forward, which has two names for it.

    transformers 5.24 calls it `cache`, 5.19 `past_key_values`, and each takes the other's name in
    silence and forgets the cache. FolderError for a class with neither.
    """
    for name in ("cache", "past_key_values"):
        if name in inspect.signature(model.forward).parameters:
            return {name: cache}
    raise FolderError(
        f"{type(model).__name__}.forward takes no key-value cache",
        wanted="an argument cache or past_key_values",
        next_step="this class of target cannot be decoded here; use ENGINE=sglang",
    )


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's layers, in order. FolderError for a class laid out in another way."""
    layers = _decoder(model).layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def final_norm(model: Any) -> nn.Module:
    """The norm after the last layer: its output is the final state. FolderError as above."""
    norm = _decoder(model).norm
    assert isinstance(norm, nn.Module)
    return norm


def head(model: Any) -> nn.Module:
    """The module that turns final states into logits. FolderError as above."""
    for path in _HEAD_PATHS:
        module = _follow(model, path)
        if isinstance(module, nn.Module):
            return module
    raise _unknown_layout(model, _HEAD_PATHS)


def _decoder(model: Any) -> Any:
    """The innermost module that has `layers` and `norm`. FolderError when there is none."""
    for path in _DECODER_PATHS:
        module = _follow(model, path)
        layers, norm = getattr(module, "layers", None), getattr(module, "norm", None)
        if isinstance(layers, nn.ModuleList) and isinstance(norm, nn.Module):
            return module
    raise _unknown_layout(model, _DECODER_PATHS)


def _follow(model: Any, path: str) -> Any:
    """The attribute at a dotted path, or None."""
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def _unknown_layout(model: Any, paths: tuple[str, ...]) -> FolderError:
    """The error for a model class whose parts are not where they are looked for."""
    return FolderError(
        f"{type(model).__name__}: nothing that fits at {', '.join(paths)}",
        wanted="a decoder laid out like Llama: layers, norm, lm_head",
        next_step="add the class's layout in pipeline/target/load.py",
    )
