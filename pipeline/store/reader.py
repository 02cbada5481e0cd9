"""Reading shards back: mapped files, exact headers, tensors that are views."""

import mmap
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from pipeline.slate.files import read_json, write_json
from pipeline.store.errors import ShardDamaged, StoreError
from pipeline.store.index import Entry, Sample, ShardIndex
from pipeline.store.layout import SAMPLE_FIELDS, Field, ShardLayout, state_fields
from pipeline.store.rows import RowFiles, open_shard

TAP_CONVENTION = "tap k is the residual stream entering decoder layer k, counted from 0"
FINAL_CONVENTION = "after the final norm"
_FORMAT = 1
_MOST_TAPS = 64
_OPEN_MAPS = 64  # one descriptor each


@dataclass(frozen=True)
class DatasetFacts:
    """What a folder of states says of itself in dataset.json.

    hidden_size H; taps: layer ids by TAP_CONVENTION; target_fingerprint as pipeline.target.facts
    gives it; shards: number of shards.
    """

    hidden_size: int
    taps: tuple[int, ...]
    target_fingerprint: str
    shards: int

    def write(self, folder: Path) -> None:
        """Writes dataset.json."""
        write_json(
            folder / "dataset.json",
            {
                "format": _FORMAT,
                "hidden_size": self.hidden_size,
                "taps": list(self.taps),
                "tap_convention": TAP_CONVENTION,
                "final_convention": FINAL_CONVENTION,
                "target_fingerprint": self.target_fingerprint,
                "shards": self.shards,
            },
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads dataset.json. StoreError when its format or conventions are not these."""
        path = folder / "dataset.json"
        value = read_json(path)
        wanted = {
            "format": _FORMAT,
            "tap_convention": TAP_CONVENTION,
            "final_convention": FINAL_CONVENTION,
        }
        for key, right in wanted.items():
            if not isinstance(value, dict) or value.get(key) != right:
                raise StoreError(
                    f"{path}: {key} is {value.get(key) if isinstance(value, dict) else value!r}",
                    wanted=repr(right),
                    next_step="extract again with this version: make extract",
                )
        try:
            if not 1 <= len(value["taps"]) <= _MOST_TAPS:
                raise ValueError(f"{len(value['taps'])} taps")
            return cls(
                int(value["hidden_size"]),
                tuple(int(tap) for tap in value["taps"]),
                str(value["target_fingerprint"]),
                int(value["shards"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path}: {type(error).__name__}: {error}",
                wanted="hidden_size, taps, target_fingerprint, shards",
                next_step="extract again: make extract",
            ) from error


class MappedShard:
    """One shard, mapped privately; tensors are views that share the map's memory."""

    def __init__(self, path: Path, *, layout: ShardLayout) -> None:
        file = open_shard(path, layout=layout)
        try:
            # A private map is writable for torch's sake; writes would stay in this process.
            self._map = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ShardDamaged(
                f"{path}: {error.strerror}",
                wanted="a shard that can be mapped",
                next_step=f"make {path.parent.name} (a damaged disk? see dmesg)",
            ) from error
        finally:
            os.close(file)
        self._layout = layout
        self._offsets = layout.offsets()

    def rows(self, offset: int, length: int) -> dict[str, Tensor]:
        """Rows [offset, offset + length) of every field. ValueError outside the shard."""
        if offset < 0 or length < 1 or offset + length > self._layout.rows:
            raise ValueError(f"rows {offset}+{length} of {self._layout.rows}")
        return {field.name: self._view(field, offset, length) for field in self._layout.fields}

    def _view(self, field: Field, offset: int, length: int) -> Tensor:
        count = length * (1 if field.width is None else field.width)
        start = self._offsets[field.name] + offset * field.row_bytes
        flat = torch.frombuffer(self._map, dtype=field.dtype, count=count, offset=start)
        return flat.view(field.shape(length))


class _Folder:
    """Shards of one kind in a folder, with their indexes, opened when first read.

    The least recently read are let go, so that thousands of shards stay within the limits.
    """

    def __init__(self, folder: Path, prefix: str, *, fields: tuple[Field, ...]) -> None:
        self.folder, self.fields = folder, fields
        self.indexes = tuple(
            ShardIndex.read(path) for path in sorted(folder.glob(f"{prefix}-*.json"))
        )
        if not self.indexes:
            raise StoreError(
                f"{folder}: no {prefix}-*.json",
                wanted="at least one whole shard",
                next_step=f"make {folder.name}",
            )
        self.entries = tuple(entry for index in self.indexes for entry in index.entries)
        seen: set[str] = set()
        for entry in self.entries:
            if entry.id in seen:
                raise ShardDamaged(
                    f"{folder}: sample {entry.id} lies in two places",
                    wanted="every sample in exactly one shard",
                    next_step=f"make {folder.name}",
                )
            seen.add(entry.id)
        self.layouts = {index.shard: ShardLayout(fields, index.rows) for index in self.indexes}
        self._open: OrderedDict[str, MappedShard] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, entry: Entry) -> dict[str, Tensor]:
        """Every field of one sample, as views; they keep their map when the shard is let go."""
        with self._lock:
            shard = self._open.get(entry.shard)
            if shard is None:
                layout = self.layouts[entry.shard]
                shard = self._open[entry.shard] = MappedShard(
                    self.folder / entry.shard, layout=layout
                )
                if len(self._open) > _OPEN_MAPS:
                    self._open.popitem(last=False)
            self._open.move_to_end(entry.shard)
        return shard.rows(entry.offset, entry.length)


class PreparedSamples:
    """The output of `prepare`: ids and masks, in prepared order."""

    def __init__(self, folder: Path) -> None:
        self._folder = _Folder(folder, "samples", fields=SAMPLE_FIELDS)
        self.entries = self._folder.entries

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Opens a folder of prepared samples. StoreError when it is none."""
        return cls(folder)

    def read(self, entry: Entry) -> Sample:
        """One sample, as views of the map."""
        rows = self._folder.rows(entry)
        return Sample(entry.id, rows["input_ids"], rows["supervised"], entry.split)


@dataclass(frozen=True)
class States:
    """One sample with its states: views of the map, to be copied before they are changed.

    input_ids int32 [n], supervised bool [n], taps (low, mid, high) each [n, H] bf16,
    final [n, H] bf16, after the final norm.
    """

    input_ids: Tensor
    supervised: Tensor
    taps: tuple[Tensor, ...]
    final: Tensor


class StateDataset:
    """The output of `extract`: samples with their states, in prepared order."""

    def __init__(self, folder: Path) -> None:
        self.facts = DatasetFacts.read(folder)
        fields = state_fields(self.facts.hidden_size, taps=len(self.facts.taps))
        self._folder = _Folder(folder, "states", fields=fields)
        self.entries = self._folder.entries
        self.indexes = self._folder.indexes
        if len(self.indexes) != self.facts.shards:
            raise ShardDamaged(
                f"{folder}: {len(self.indexes)} shard indexes",
                wanted=f"{self.facts.shards}, as dataset.json says",
                next_step="extract again: make extract",
            )

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Opens a folder of states. StoreError when it is none or has another format."""
        return cls(folder)

    @property
    def hidden_size(self) -> int:
        """H of the target."""
        return self.facts.hidden_size

    @property
    def taps(self) -> tuple[int, ...]:
        """Layer ids of the taps, by TAP_CONVENTION."""
        return self.facts.taps

    @property
    def target_fingerprint(self) -> str:
        """Fingerprint of the target whose states these are."""
        return self.facts.target_fingerprint

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(sample id, reason) of every sample that was left out."""
        return tuple(pair for index in self.indexes for pair in index.skipped)

    def read(self, entry: Entry) -> States:
        """One sample with its states, as views."""
        rows = self._folder.rows(entry)
        taps = tuple(rows[f"tap_{number}"] for number in range(len(self.taps)))
        return States(rows["input_ids"], rows["supervised"], taps, rows["final"])

    def row_files(self, *, direct: bool | None = None) -> RowFiles:
        """Its files, for reading rows into memory of the caller's; direct: see RowFiles."""
        return RowFiles(self._folder.folder, self._folder.layouts, direct=direct)
