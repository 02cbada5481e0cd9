"""A GGUF file turned once into an ordinary Hugging Face folder.

The weights are dequantised to float32 and rounded once to bfloat16; `gguf_check` proves them from
the block formats' definitions. Only the `llama` architecture is converted: each other one orders
its weights in a way of its own, and a wrong order trains without a complaint.
Sources: GGUF specification (ggml docs/gguf.md), llama.cpp convert_hf_to_gguf.py (LlamaModel).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from safetensors.torch import save_file

from pipeline.slate.files import fsync_directory, write_json
from pipeline.target.errors import GgufError
from pipeline.target.gguf_tokenizer import TokenizerReport, write_tokenizer

WEIGHTS_NAME = "model.safetensors"

# GGUF's name -> Hugging Face's name; {layer} stands for the block's number.
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_BLOCK_NAMES = {
    "blk.{layer}.attn_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "blk.{layer}.attn_q.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "blk.{layer}.attn_k.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "blk.{layer}.attn_v.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "blk.{layer}.attn_output.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    "blk.{layer}.ffn_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "blk.{layer}.ffn_gate.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "blk.{layer}.ffn_up.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "blk.{layer}.ffn_down.weight": "model.layers.{layer}.mlp.down_proj.weight",
}
_HEAD_NAME = ("output.weight", "lm_head.weight")


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion wrote: counts, tensor kinds of the source, and the tokenizer's facts."""

    tensors: int
    parameters: int
    kinds: dict[str, int]
    tied: bool
    tokenizer: TokenizerReport


def convert_gguf(gguf_file: Path, folder: Path) -> ConversionReport:
    """Writes a Hugging Face folder: bf16 safetensors, config, generation config and tokenizer.

    Files of the same names in `folder` are replaced. The weights come last, by rename, so a folder
    with weights is a whole one. GgufError when the file is broken, of another architecture, lacks
    a tensor, has one too many, or holds a value that is not finite.
    """
    reader = open_gguf(gguf_file)
    fields = read_fields(reader)
    config = _config(gguf_file, fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = _expected_names(gguf_file, tensors, layers=config["num_hidden_layers"])
    config["tie_word_embeddings"] = _HEAD_NAME[0] not in names
    shapes = tensor_shapes(config)

    weights: dict[str, torch.Tensor] = {}
    kinds: dict[str, int] = {}
    for source, name in names.items():
        tensor = tensors[source]
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
        values = _dequantise(gguf_file, tensor, shape=shapes[name.split(".")[-2]])
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _rotary_halves(values, head_dim=config["head_dim"])
        weights[name] = torch.from_numpy(values).to(torch.bfloat16)

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(
        gguf_file, fields, folder, max_length=config["max_position_embeddings"]
    )
    write_json(folder / "config.json", config | tokenizer.special_ids)
    write_json(folder / "generation_config.json", tokenizer.special_ids)
    _save(weights, folder)
    return ConversionReport(
        tensors=len(weights),
        parameters=sum(weight.numel() for weight in weights.values()),
        kinds=dict(sorted(kinds.items())),
        tied=config["tie_word_embeddings"],
        tokenizer=tokenizer,
    )


def open_gguf(gguf_file: Path) -> Any:
    """A reader on the memory-mapped file. GgufError when it is absent, cut or no GGUF."""
    try:
        return _BoundedReader(gguf_file)
    # The reader has no error type of its own: a cut file shows as an index or value error.
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise GgufError(
            f"{gguf_file}: {type(error).__name__}: {error}",
            wanted="a whole GGUF file",
            next_step="fetch the file again",
        ) from error


class _BoundedReader(gguf.GGUFReader):
    """The reader, which alone would go on behind the file's end for as long as a count says."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if count < 0 or end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, its header speaks of {end}")
        return super()._get(offset, dtype, count, override_order)


def read_fields(reader: Any) -> dict[str, Any]:
    """The file's metadata as plain values by key."""
    return {key: field.contents() for key, field in reader.fields.items()}


def _config(gguf_file: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face configuration of a llama model, in the spellings old and new readers know.

    GgufError when the architecture is another one or a key is absent.
    """
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise GgufError(
            f"{gguf_file}: architecture {architecture!r}",
            wanted="'llama', the only one whose weight order is known here",
            next_step="use a target that is a Hugging Face folder already",
        )
    scaling = sorted(key for key in fields if key.startswith("llama.rope.scaling"))
    experts = fields.get("llama.expert_count", 0)
    if scaling or experts:
        raise GgufError(
            f"{gguf_file}: {', '.join(scaling) or f'{experts} experts'}",
            wanted="a dense llama without rotary scaling",
            next_step="use a target that is a Hugging Face folder already",
        )
    try:
        hidden = int(fields["llama.embedding_length"])
        heads = int(fields["llama.attention.head_count"])
        theta = float(fields.get("llama.rope.freq_base", 10000.0))
        head_dim = int(fields.get("llama.attention.key_length", hidden // heads))
        rotated = int(fields.get("llama.rope.dimension_count", head_dim))
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": int(fields["llama.feed_forward_length"]),
            "num_hidden_layers": int(fields["llama.block_count"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "max_position_embeddings": int(fields["llama.context_length"]),
            # Stored as float32: 1e-05 comes back as 9.999999747378752e-06 unless shortened.
            "rms_norm_eps": float(
                str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))
            ),
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "torch_dtype": "bfloat16",
        }
        if min(hidden, heads, head_dim) < 1 or head_dim % 2:
            raise ValueError(f"of {hidden} channels, {heads} heads of {head_dim}")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise GgufError(
            f"{gguf_file}: metadata is absent or of another type: {type(error).__name__}: {error}",
            wanted="the keys of a llama model",
            next_step="fetch the file again or use another target",
        ) from error
    if rotated != head_dim:
        raise GgufError(
            f"{gguf_file}: {rotated} of {head_dim} channels of a head are rotated",
            wanted="all of them, as Hugging Face's llama does",
            next_step="use a target that is a Hugging Face folder already",
        )
    return config


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each weight by the module's own name (`q_proj`, `norm`, ...), [out, in]."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    return {
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _expected_names(gguf_file: Path, tensors: Mapping[str, Any], *, layers: int) -> dict[str, str]:
    """GGUF name -> Hugging Face name for the whole model.

    The head is left out when the file has none (tied). GgufError when a tensor is absent, or one
    is there that has no place: an unread tensor (a bias, a rotary table) changes the model.
    """
    names = dict(_MODEL_NAMES)
    for layer in range(min(layers, len(tensors))):  # a count of 10^18 costs nothing
        for source, name in _BLOCK_NAMES.items():
            names[source.format(layer=layer)] = name.format(layer=layer)
    if _HEAD_NAME[0] in tensors:
        names[_HEAD_NAME[0]] = _HEAD_NAME[1]
    missing = sorted(names.keys() - tensors.keys())
    extra = sorted(tensors.keys() - names.keys())
    if missing or extra:
        raise GgufError(
            f"{gguf_file}: tensors missing: {missing[:5]}, without a place: {extra[:5]}",
            wanted=f"exactly the tensors of a llama with {layers} layers",
            next_step="use a target that is a Hugging Face folder already",
        )
    return names


def _dequantise(gguf_file: Path, tensor: Any, *, shape: tuple[int, ...]) -> Any:
    """A tensor's values as float32 numpy [out, in]. GgufError on a wrong shape or a non-finite."""
    found = tuple(int(size) for size in reversed(tensor.shape))
    if found != shape:
        raise GgufError(
            f"{gguf_file}: {tensor.name} has shape {found}",
            wanted=f"{shape}, as the metadata says",
            next_step="fetch the file again",
        )
    try:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise GgufError(
            f"{gguf_file}: {tensor.name} is stored as {tensor.tensor_type.name}",
            wanted="a kind of block that can be dequantised",
            next_step="use another quantisation of the model",
        ) from error
    values = np.array(values, dtype=np.float32).reshape(shape)  # a copy: the map is read-only
    if not np.isfinite(values).all():
        raise GgufError(
            f"{gguf_file}: {tensor.name} holds values that are not finite",
            wanted="finite weights",
            next_step="fetch the file again",
        )
    return values


def _rotary_halves(values: Any, *, head_dim: int) -> Any:
    """Query or key rows from llama.cpp's order (rotary pairs side by side) to Hugging Face's.

    values [heads * head_dim, in] float32. llama.cpp interleaves the two halves of each head when
    it converts (LlamaModel.permute); here they are put one after the other again.
    """
    rows, width = values.shape
    pairs = values.reshape(rows // head_dim, head_dim // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)


def _save(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes the weights under their final name by rename, so a killed run leaves none."""
    partial = folder / f".{WEIGHTS_NAME}.partial"
    try:
        save_file(dict(weights), partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(folder / WEIGHTS_NAME)
    finally:
        partial.unlink(missing_ok=True)
    fsync_directory(folder)
