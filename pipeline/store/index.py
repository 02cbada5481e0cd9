"""What is in a shard: one entry a sample, and the digest that ties an entry to its rows."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import torch
from torch import Tensor

from pipeline.slate.files import read_json, write_json
from pipeline.store.errors import ShardDamaged
from pipeline.store.layout import Field

Split = Literal["train", "held_out"]
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Sample:
    """A prepared conversation: input_ids int32 [n], supervised bool [n], both on the CPU."""

    id: str
    input_ids: Tensor
    supervised: Tensor
    split: Split


@dataclass(frozen=True)
class Entry:
    """Where a sample lies: rows [offset, offset + length) of a shard.

    supervised: number of supervised tokens; digest: sha256 over the rows of every field.
    """

    id: str
    split: Split
    shard: str
    offset: int
    length: int
    supervised: int
    digest: str


@dataclass(frozen=True)
class ShardIndex:
    """A whole shard: its file, number of rows, file digest, entries, and samples left out."""

    shard: str
    rows: int
    sha256: str
    entries: tuple[Entry, ...]
    skipped: tuple[tuple[str, str], ...] = ()  # (sample id, reason)

    def write(self, path: Path) -> None:
        """Writes the index atomically; from then on the shard counts as whole."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads an index. ShardDamaged when it is not one or contradicts itself."""
        value: Any = read_json(path)
        try:
            index = cls(
                shard=_of(value["shard"], str),
                rows=_of(value["rows"], int),
                sha256=_of(value["sha256"], str),
                entries=tuple(_entry(entry) for entry in value["entries"]),
                skipped=tuple((_of(name, str), _of(why, str)) for name, why in value["skipped"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error
        if index.shard != path.with_suffix(".safetensors").name:
            raise _damaged(path, f"it names the shard {index.shard!r}, not the one beside it")
        position = 0
        for entry in index.entries:
            if entry.shard != index.shard or entry.offset != position or entry.length < 1:
                raise _damaged(path, f"sample {entry.id} does not follow the one before it")
            position += entry.length
        if position != index.rows:
            raise _damaged(path, f"entries cover {position} rows of {index.rows}")
        return index


def _entry(value: Any) -> Entry:
    """TypeError or ValueError for what is no entry, type by type."""
    entry = Entry(**value)
    for field in fields(Entry):
        _of(getattr(entry, field.name), int if field.type is int else str)
    if entry.split not in get_args(Split) or not 0 <= entry.supervised <= entry.length:
        raise ValueError(f"split {entry.split!r}, {entry.supervised} of {entry.length} supervised")
    return entry


def _of(value: Any, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r:.80} is not of type {kind.__name__}")
    return value


def _damaged(path: Path, what: str) -> ShardDamaged:
    return ShardDamaged(
        f"{path}: {what}",
        wanted="an index as this version writes it, samples end to end",
        next_step=f"make verify says what else is damaged; make {path.parent.name} makes it anew",
    )


def counts_of(entries: Sequence[Entry], skipped: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Counts of a seal over states; skipped: (sample id, reason). read = kept + skipped."""
    return {
        "read": len(entries) + len(skipped),
        "kept": len(entries),
        "skipped": dict(Counter(reason for _, reason in skipped)),
        "rows": sum(entry.length for entry in entries),
        "rows_per_split": {
            split: sum(entry.length for entry in entries if entry.split == split)
            for split in ("train", "held_out")
        },
    }


def sample_digest(fields: tuple[Field, ...], rows: Mapping[str, Tensor]) -> str:
    """Digest of one sample's rows, each field with its name, type and shape. Hex sha256."""
    digest = hashlib.sha256()
    for field in fields:
        tensor = rows[field.name]
        digest.update(digest_head(field.name, tensor.dtype, tuple(tensor.shape)))
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def digest_head(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What a sample's digest takes in before the bytes of a field."""
    return f"{name} {dtype} {list(shape)}\n".encode()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row order, without a copy when it is contiguous."""
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
