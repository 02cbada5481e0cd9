"""Which weight files a folder has, and which tensor lies in which: safetensors headers only.

The layout is never guessed: one file, or an index that agrees with its shards.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.settings.strict_json import parse_json, read_plain
from pipeline.target.errors import FolderError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_LENGTH_BYTES = 8  # a safetensors file opens with its header's length, little-endian
_HEADER_LIMIT_BYTES = 100_000_000  # safetensors' own limit
_NEXT_STEP = "fetch the model's folder again, whole"


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies and what its header says of it, bytes [start, end) of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class WeightFile:
    """One weight file: its size and the sha256 of its header (names, types, shapes, offsets)."""

    path: Path
    size_bytes: int
    header_sha256: str


@dataclass(frozen=True)
class WeightLayout:
    """All weight files of a folder, in name order, and every tensor's place by name."""

    files: tuple[WeightFile, ...]
    tensors: dict[str, TensorPlace]


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as a mapping. FolderError when absent or broken."""
    path = folder / "config.json"
    try:
        # Some published configurations do hold Infinity.
        config = parse_json(read_plain(path), infinite=True)
    except (OSError, ValueError) as error:
        raise FolderError(
            f"{path}: {type(error).__name__}: {error}",
            wanted="a Hugging Face model folder with a readable config.json",
            next_step="check the target's folder in the profile",
        ) from error
    if not isinstance(config, dict):
        raise FolderError(
            f"{path}: a {type(config).__name__}", wanted="a JSON object", next_step=_NEXT_STEP
        )
    return config


def read_layout(folder: Path) -> WeightLayout:
    """Finds the weight files and reads their headers; no weight is read.

    With an index, exactly its shards count and each must hold what the index says. Without one
    there must be a single safetensors file. FolderError when a shard is missing or cut, the index
    and its shards disagree, both or none of the two layouts are there.
    """
    index_path = folder / INDEX_NAME
    single = folder / SINGLE_NAME
    present = sorted(folder.glob("*.safetensors"))
    if index_path.exists() and single.exists():
        raise FolderError(
            f"{folder}: both {INDEX_NAME} and {SINGLE_NAME}",
            wanted="one of them: readers disagree about which counts",
            next_step="delete the file that is left over from another download",
        )
    if index_path.exists():
        return _indexed_layout(folder, index_path)
    if present != [single]:
        names = [path.name for path in present] or sorted(p.name for p in folder.glob("*.bin"))
        raise FolderError(
            f"{folder}: no {INDEX_NAME}, weight files {names}",
            wanted=f"{SINGLE_NAME}, or shards with their index (pickled .bin files are not read)",
            next_step=_NEXT_STEP,
        )
    file, tensors = _read_header(present[0])
    return WeightLayout(files=(file,), tensors=tensors)


def _indexed_layout(folder: Path, index_path: Path) -> WeightLayout:
    """The layout that an index describes, proven against its shards' headers."""
    try:
        index = parse_json(read_plain(index_path))
        weight_map: dict[str, str] = dict(index["weight_map"])
        if wrong := [name for name in weight_map.values() if not isinstance(name, str)]:
            raise TypeError(f"a file named {wrong[0]!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(
            f"{index_path}: {type(error).__name__}: {error}",
            wanted="a safetensors index with a weight_map",
            next_step=_NEXT_STEP,
        ) from error
    names = sorted(set(weight_map.values()))
    unsafe = [name for name in names if Path(name).name != name]
    missing = [name for name in names if not (folder / name).is_file()]
    if unsafe or missing or not names:
        raise FolderError(
            f"{index_path} names files that are not in the folder: {unsafe or missing}",
            wanted=f"its {len(names)} shards, beside the index",
            next_step=_NEXT_STEP,
        )
    headers = {name: _read_header(folder / name) for name in names}
    astray = [name for name, shard in weight_map.items() if name not in headers[shard][1]]
    if astray:
        raise FolderError(
            f"{index_path}: {astray[0]} is not in {weight_map[astray[0]]} "
            f"({len(astray)} such tensors)",
            wanted="shards that hold what the index says",
            next_step=_NEXT_STEP,
        )
    return WeightLayout(
        files=tuple(headers[name][0] for name in names),
        tensors={name: headers[shard][1][name] for name, shard in weight_map.items()},
    )


def _read_header(path: Path) -> tuple[WeightFile, dict[str, TensorPlace]]:
    """One file's header. FolderError when the file is cut or its header is no such thing."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(size_bytes, _HEADER_LIMIT_BYTES):
                raise ValueError(f"header of {length} bytes in a file of {size_bytes}")
            raw = file.read(length)
        header = parse_json(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 0
        for name, entry in entries.items():
            first, last = map(int, entry["data_offsets"])
            if not 0 <= first <= last:
                raise ValueError(f"{name} lies from {first} to {last}")
            end = max(end, last)
        if _LENGTH_BYTES + length + end != size_bytes:
            raise ValueError(f"{size_bytes} bytes where its header describes {length + 8 + end}")
        tensors = {
            name: TensorPlace(
                path,
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                *(_LENGTH_BYTES + length + int(place) for place in entry["data_offsets"]),
            )
            for name, entry in entries.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FolderError(
            f"{path}: {type(error).__name__}: {error}",
            wanted="a whole safetensors file",
            next_step=_NEXT_STEP,
        ) from error
    return WeightFile(path, size_bytes, hashlib.sha256(raw).hexdigest()), tensors
