"""Where each tensor of a shard lies in its file.

A shard is an ordinary safetensors file (8 bytes of header length, a JSON header, the tensors) whose
layout follows from the number of rows alone, so that rows can be written at their place in any
order and a reader can demand the exact header instead of parsing a foreign one.
Format: https://github.com/huggingface/safetensors#format
"""

import json
from dataclasses import dataclass

import torch

_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.int32: "I32", torch.bool: "BOOL"}
_HEADER_ALIGNMENT = 4096  # tensors start on a page, so maps of them are aligned


@dataclass(frozen=True)
class Field:
    """One tensor of a shard: [N] when width is None, else [N, width]."""

    name: str
    dtype: torch.dtype
    width: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * (1 if self.width is None else self.width)

    def shape(self, rows: int) -> tuple[int, ...]:
        """Shape for a number of rows."""
        return (rows,) if self.width is None else (rows, self.width)


# Widest first keeps every tensor aligned to its own item size.
INPUT_IDS = Field("input_ids", torch.int32)
SUPERVISED = Field("supervised", torch.bool)
SAMPLE_FIELDS = (INPUT_IDS, SUPERVISED)


def state_fields(hidden_size: int, *, taps: int) -> tuple[Field, ...]:
    """Fields of a shard of states: the taps and the final state [N, H] bf16, ids and mask."""
    states = [Field(f"tap_{number}", torch.bfloat16, hidden_size) for number in range(taps)]
    return (*states, Field("final", torch.bfloat16, hidden_size), *SAMPLE_FIELDS)


def row_bytes(fields: tuple[Field, ...]) -> int:
    """Bytes that one token position takes over all fields."""
    return sum(field.row_bytes for field in fields)


@dataclass(frozen=True)
class ShardLayout:
    """Header and offsets of a shard with a given number of rows."""

    fields: tuple[Field, ...]
    rows: int

    def header(self) -> bytes:
        """The file's first bytes, up to the first tensor."""
        entries = {}
        start = 0
        for field in self.fields:
            end = start + field.row_bytes * self.rows
            entries[field.name] = {
                "dtype": _SAFETENSORS_NAMES[field.dtype],
                "shape": list(field.shape(self.rows)),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        padded = -(8 + len(text)) % _HEADER_ALIGNMENT + len(text)
        return padded.to_bytes(8, "little") + text.ljust(padded)

    def offsets(self) -> dict[str, int]:
        """Byte at which each field's first row lies."""
        start = len(self.header())
        found = {}
        for field in self.fields:
            found[field.name] = start
            start += field.row_bytes * self.rows
        return found

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header()) + row_bytes(self.fields) * self.rows
