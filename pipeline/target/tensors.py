"""Embedding and head of a target, straight out of its safetensors: no model is built.

A name is looked for at every nesting that published targets use; what is found must have the
size that the configuration says. Nothing is ever initialised here.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.slate.files import read_through
from pipeline.target.errors import TensorError
from pipeline.target.facts import is_tied, said_or_default, text_config
from pipeline.target.layout import TensorPlace, WeightLayout, read_config, read_layout

# Plain decoders; decoders inside a multimodal target, in both orders of nesting (LLaVA and
# Kimi-K2.5 have language_model.model., transformers 5 has model.language_model.).
_EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "model.language_model.model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
    "embed_tokens.weight",
)
_HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "model.lm_head.weight",
)
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# What some classes do to the logits behind the head, and the value with which nothing is done.
_BEHIND_HEAD = {
    "final_logit_softcapping": None,  # Gemma 2
    "logits_soft_cap": None,  # RecurrentGemma
    "logits_scaling": 1.0,  # Granite
    "logit_scale": 1.0,  # Cohere
    "lm_head_multiplier": 1.0,  # Falcon-H1
    "output_multiplier_scale": 1.0,  # Grok
    "dim_model_base": None,  # MiniCPM
}
_NEXT_STEP = "use a folder with plain weights (bf16, fp16 or fp32), or fetch this one again, whole"


def check_ends(folder: Path) -> None:
    """Whether a drafter can be trained on this target: embedding and head can be read.

    And the logits are the head's product alone, which is how the teacher is rebuilt from final
    states. TensorError and FolderError as read_embedding.
    """
    read_embedding(folder)
    read_head(folder)
    text = text_config(read_config(folder))
    for key, nothing in _BEHIND_HEAD.items():
        value = said_or_default(text, key)
        if value not in (None, nothing):
            raise TensorError(
                f"{folder / 'config.json'}: {key} is {value!r}",
                wanted="logits that are the head's product with the final state, and no more",
                next_step="use another target: what this one does behind its head is not rebuilt",
            )


def read_embedding(folder: Path) -> Tensor:
    """The embedding, [V, H], in the precision it is stored in.

    TensorError when it is absent (with the names looked for and the near ones found), ambiguous,
    quantised, or of another size than the configuration's; FolderError as read_layout.
    """
    config, layout = read_config(folder), read_layout(folder)
    name = _find(folder, layout, _EMBEDDING_NAMES, what="embedding")
    if name is None:
        raise _absent(folder, layout, _EMBEDDING_NAMES, what="embedding")
    return _read(layout.tensors[name], name, config=config)


def read_head(folder: Path) -> Tensor:
    """The head, [V, H], in the precision it is stored in; the embedding for a tied target.

    A tied target that stores a head as well must store the same one: readers disagree about which
    of two counts. TensorError and FolderError as read_embedding.
    """
    config, layout = read_config(folder), read_layout(folder)
    name = _find(folder, layout, _HEAD_NAMES, what="head")
    if not is_tied(config):
        if name is None:
            raise _absent(folder, layout, _HEAD_NAMES, what="head of an untied target")
        return _read(layout.tensors[name], name, config=config)
    embedding = read_embedding(folder)
    if name is not None and not torch.equal(
        _read(layout.tensors[name], name, config=config), embedding
    ):
        raise TensorError(
            f"{folder}: tie_word_embeddings is true, yet {name} differs from the embedding",
            wanted="one head",
            next_step="set tie_word_embeddings to what the target was trained with",
        )
    return embedding


def _find(folder: Path, layout: WeightLayout, names: Sequence[str], *, what: str) -> str | None:
    """The one name of `names` that is stored, or None.

    TensorError when there are two, when the tensor is there in a packed form only, or when scales
    or a bias belong to it.
    """
    found = [name for name in names if name in layout.tensors]
    if len(found) > 1:
        raise TensorError(
            f"{folder}: {what} under {len(found)} names: {', '.join(found)}",
            wanted="one",
            next_step=_NEXT_STEP,
        )
    if found:
        stem = found[0].removesuffix("weight")
        beside = sorted(name for name in layout.tensors if name.startswith(stem))
        beside.remove(found[0])
        if beside:
            raise TensorError(
                f"{folder}: {what}: beside {found[0]} lies {', '.join(beside)}",
                wanted="a weight that counts as it stands, without scales and without a bias",
                next_step=_NEXT_STEP,
            )
        return found[0]
    stems = tuple(name.removesuffix("weight") for name in names)
    packed = sorted(name for name in layout.tensors for stem in stems if name.startswith(stem))
    if packed:
        raise TensorError(
            f"{folder}: {what} is stored in a packed form: {', '.join(packed)}",
            wanted="a plain weight: a packed one is not unpacked here",
            next_step=_NEXT_STEP,
        )
    return None


def _absent(folder: Path, layout: WeightLayout, names: Sequence[str], *, what: str) -> TensorError:
    """The error for a tensor that no known name has, with what comes near."""
    near = [
        name
        for name in layout.tensors
        if any(part in name for part in ("embed", "lm_head", "wte", "output"))
    ]
    near += difflib.get_close_matches(names[0], layout.tensors, n=3)
    listed = ", ".join(dict.fromkeys(near[:6])) or "none"
    return TensorError(
        f"{folder}: no {what}; looked for {', '.join(names)}; near ones: {listed}",
        wanted="a tensor of one of these names",
        next_step="check that the folder is a whole decoder; a new layout is added in "
        "pipeline/target/tensors.py",
    )


def _read(place: TensorPlace, name: str, *, config: Mapping[str, Any]) -> Tensor:
    """Reads one tensor after its type and size are proven. TensorError else."""
    text = text_config(config)
    wanted = (text.get("vocab_size"), text.get("hidden_size"))
    if place.dtype not in _PLAIN_DTYPES:
        raise TensorError(
            f"{place.file}: {name} is stored as {place.dtype} (quantised)",
            wanted=f"one of {', '.join(sorted(_PLAIN_DTYPES))}",
            next_step=_NEXT_STEP,
        )
    if place.shape != wanted:
        where = "text_config of config.json" if text is not config else "config.json"
        raise TensorError(
            f"{place.file}: {name} has shape {list(place.shape)}",
            wanted=f"[vocab_size, hidden_size] = {list(wanted)} of {where}",
            next_step="check that the weights in the folder belong to its config.json",
        )
    tensor = read_tensor(place, name)
    if not bool(torch.isfinite(tensor).all()):
        raise TensorError(
            f"{place.file}: {name} holds values that are not finite",
            wanted="finite weights",
            next_step="fetch the model's folder again, whole",
        )
    return tensor


def read_tensor(place: TensorPlace, name: str) -> Tensor:
    """A stored tensor, as a map of its file. TensorError when it cannot be read."""
    try:
        read_through(place.file, start=place.start, end=place.end)
        with safe_open(place.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (OSError, SafetensorError, RuntimeError) as error:  # the last: torch cannot open it
        raise TensorError(
            f"{place.file}: {name}: {error}",
            wanted="a whole safetensors file on a disk that can be read",
            next_step="fetch the model's folder again, whole (a damaged disk? see dmesg)",
        ) from error
