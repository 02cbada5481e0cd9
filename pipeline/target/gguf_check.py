"""An independent proof of converted weights, from the block formats' definitions.

Shares nothing with the conversion but the file's table of tensors: bytes are unpacked here as
ggml-common.h lays them out, rows are placed by an index formula, and every bfloat16 must come out
bit for bit. Source: llama.cpp ggml/src/ggml-common.h (block_q4_0 .. block_q6_K), ggml-quants.c.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from pipeline.target.errors import WeightMismatch
from pipeline.target.gguf import WEIGHTS_NAME, open_gguf

_NEXT_STEP = "delete the folder and run make prepare again; if it stays, report the file"

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Hugging Face's name of a weight inside a block -> GGUF's.
_IN_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class WeightCheck:
    """tensors compared, and the greatest |stored - dequantised|, which is bf16's rounding alone."""

    tensors: int
    greatest_difference: float


def check_weights(gguf_file: Path, folder: Path) -> WeightCheck:
    """Compares every stored weight with its own dequantisation of the GGUF file.

    WeightMismatch, naming the tensor, when one is absent, extra, of another shape or dtype, of a
    block kind unknown here, or differs in a single bit from the bfloat16 rounding.
    """
    reader = open_gguf(gguf_file)
    sources = {tensor.name: tensor for tensor in reader.tensors}
    weights = folder / WEIGHTS_NAME
    greatest = 0.0
    try:
        with safe_open(weights, framework="pt") as stored:
            names = {name: _gguf_name(name) for name in stored.keys()}  # noqa: SIM118
            unmatched = sorted(set(sources) ^ {str(name) for name in names.values()})
            if unmatched:
                raise WeightMismatch(
                    f"{weights}: tensors on one side only: {unmatched[:5]}",
                    wanted=f"the {len(sources)} tensors of {gguf_file.name}",
                    next_step=_NEXT_STEP,
                )
            for name, source in names.items():
                difference = _compare(name, stored.get_tensor(name), sources[str(source)], reader)
                greatest = max(greatest, difference)
    except (OSError, SafetensorError) as error:
        raise WeightMismatch(
            f"{weights}: {error}", wanted="a whole safetensors file", next_step=_NEXT_STEP
        ) from error
    return WeightCheck(tensors=len(names), greatest_difference=greatest)


def _gguf_name(name: str) -> str | None:
    """GGUF's name of a Hugging Face weight; None when there is none."""
    stem = name.removesuffix(".weight")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.weight"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if match is None or match[2] not in _IN_BLOCK:
        return None
    return f"blk.{match[1]}.{_IN_BLOCK[match[2]]}.weight"


def _compare(name: str, stored: torch.Tensor, source: Any, reader: Any) -> float:
    """Greatest |stored - dequantised| of one tensor. WeightMismatch unless equal in every bit."""
    kind = source.tensor_type.name
    if kind not in _UNPACK:
        raise WeightMismatch(
            f"{name}: stored as {kind}, which cannot be checked",
            wanted=f"one of {sorted(_UNPACK)}",
            next_step="use another quantisation of the model",
        )
    shape = tuple(int(size) for size in reversed(source.shape))
    raw = np.frombuffer(np.ascontiguousarray(source.data).tobytes(), dtype=np.uint8)
    values = _UNPACK[kind](raw).reshape(shape)
    if "self_attn.q_proj" in name or "self_attn.k_proj" in name:
        key = "head_count" if "q_proj" in name else "head_count_kv"
        heads = int(reader.fields[f"llama.attention.{key}"].contents())
        values = values[_row_order(shape[0], heads=heads)]
    wanted = torch.from_numpy(np.array(values, order="C"))  # a copy: the map is read-only
    if stored.dtype != torch.bfloat16 or tuple(stored.shape) != shape:
        raise WeightMismatch(
            f"{name}: {stored.dtype} {tuple(stored.shape)}",
            wanted=f"torch.bfloat16 {shape}",
            next_step=_NEXT_STEP,
        )
    unequal = stored.view(torch.int16) != wanted.to(torch.bfloat16).view(torch.int16)
    if bool(unequal.any()):
        place = tuple(int(index) for index in torch.nonzero(unequal)[0])
        raise WeightMismatch(
            f"{name}: {int(unequal.sum())} of {unequal.numel()} values differ, "
            f"first at {place}: {float(stored[place])}",
            wanted=f"{float(wanted[place])} rounded to bfloat16",
            next_step=_NEXT_STEP,
        )
    return float((stored.float() - wanted).abs().max())


def _row_order(rows: int, *, heads: int) -> NDArray[np.int64]:
    """Which GGUF row each Hugging Face row of a query or key weight is.

    Inside a head of size d, Hugging Face's row r rotates with row r + d/2; llama.cpp keeps the two
    side by side. So row r comes from row 2r of the head when r < d/2, else from 2(r - d/2) + 1.
    """
    size = rows // heads
    row = np.arange(rows)
    head, inside = row // size, row % size
    second = inside >= size // 2
    return head * size + np.where(second, 2 * (inside - size // 2) + 1, 2 * inside)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """Values 0..15 of packed bytes [blocks, 16]: low halves, then high ones [blocks, 32]."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _q4_0(raw: Bytes) -> Floats:
    """block_q4_0: half d, 16 bytes; value = d * (nibble - 8)."""
    blocks = raw.reshape(-1, 18)
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - np.float32(8))


def _q4_1(raw: Bytes) -> Floats:
    """block_q4_1: half d, half m, 16 bytes; value = d * nibble + m."""
    blocks = raw.reshape(-1, 20)
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q8_0(raw: Bytes) -> Floats:
    """block_q8_0: half d, 32 signed bytes; value = d * byte."""
    blocks = raw.reshape(-1, 34)
    return _half(blocks, 0) * blocks[:, 2:].copy().view(np.int8).astype(np.float32)


def _q6_k(raw: Bytes) -> Floats:
    """block_q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, half d.

    256 values in two halves of 128; in each, value 32 j + l has its low four bits in byte
    l + 32 (j mod 2), low nibble for j < 2, its high two bits in pair j of byte l, and the scale of
    its sixteen; value = d * scale * (bits - 32).
    """
    blocks = raw.reshape(-1, 210)
    values = np.empty((len(blocks), 256), dtype=np.float32)
    scales = blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    d = _half(blocks, 208)
    for half in range(2):
        low = blocks[:, 64 * half : 64 * half + 64]
        high = blocks[:, 128 + 32 * half : 160 + 32 * half]
        for j in range(4):
            four = (low[:, 32 * (j % 2) : 32 * (j % 2) + 32] >> (4 * (j // 2))) & 0x0F
            two = (high >> (2 * j)) & 0x03
            bits = (four | (two << 4)).astype(np.float32) - np.float32(32)
            first = 8 * half + 2 * j
            scale = np.repeat(d * scales[:, first : first + 2], 16, axis=1)
            start = 128 * half + 32 * j
            values[:, start : start + 32] = scale * bits
    return values


def _bf16(raw: Bytes) -> Floats:
    """The upper half of a float32."""
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


_UNPACK: dict[str, Callable[[Bytes], Floats]] = {
    "F32": lambda raw: raw.view("<f4"),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
}
