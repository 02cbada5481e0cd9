"""Writing shards: laid out beforehand, filled in any order, visible when whole."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.slate.files import fsync_directory, named, sha256_file
from pipeline.store.errors import StoreError
from pipeline.store.index import Entry, Sample, ShardIndex, Split, sample_digest, tensor_bytes
from pipeline.store.layout import SAMPLE_FIELDS, Field, ShardLayout

_COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class PlannedSample:
    """A sample that a shard will hold: its id, number of rows and split."""

    id: str
    length: int
    split: Split


class ShardBuilder:
    """One shard under construction.

    folder/name.safetensors and folder/name.json appear when `finish` succeeds; until then there is
    a hidden partial file, which `abandon` (or the next wipe) removes. The space is reserved at
    once, so that a full disk is an error here and never a broken map later.
    """

    def __init__(
        self, folder: Path, name: str, *, fields: tuple[Field, ...], plan: Sequence[PlannedSample]
    ) -> None:
        self._folder, self._name, self._fields = folder, name, fields
        self._plan = {sample.id: sample for sample in plan}
        if len(self._plan) != len(plan):
            raise ValueError("a sample id is planned twice in one shard")
        self._offsets: dict[str, int] = {}
        rows = 0
        for sample in plan:
            self._offsets[sample.id] = rows
            rows += sample.length
        self._layout = ShardLayout(fields, rows)
        self._starts = self._layout.offsets()
        self._digests: dict[str, tuple[str, int]] = {}  # id -> digest, supervised tokens
        self._skipped: dict[str, str] = {}
        self._partial = folder / f".{name}.partial"
        self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            with named(self._partial):
                os.posix_fallocate(self._file, 0, self._layout.file_bytes)
                write_all(self._file, memoryview(self._layout.header()), 0)
        except BaseException:
            self.abandon()
            raise

    @property
    def missing(self) -> list[str]:
        """Planned samples that were neither placed nor skipped."""
        return [
            name for name in self._plan if name not in self._digests and name not in self._skipped
        ]

    def place(self, sample_id: str, rows: Mapping[str, Tensor]) -> None:
        """Writes a sample's rows at its place: every field, [n] or [n, width], exact dtype.

        StoreError when the sample is not planned here, was decided before, or a field's shape or
        dtype is not the planned one.
        """
        self._decide(sample_id)
        length = self._plan[sample_id].length
        if set(rows) != {field.name for field in self._fields}:
            raise _refused(sample_id, f"fields {sorted(rows)}", "exactly the shard's fields")
        for field in self._fields:
            tensor = rows[field.name]
            if tensor.dtype != field.dtype or tuple(tensor.shape) != field.shape(length):
                found = f"{field.name} {tensor.dtype} {list(tensor.shape)}"
                wanted = f"{field.dtype} {list(field.shape(length))}"
                raise _refused(sample_id, found, wanted)
        for field in self._fields:
            start = self._starts[field.name] + self._offsets[sample_id] * field.row_bytes
            with named(self._partial):
                write_all(self._file, tensor_bytes(rows[field.name]), start)
        self._digests[sample_id] = (
            sample_digest(self._fields, rows),
            int(rows["supervised"].sum()),
        )

    def skip(self, sample_id: str, reason: str) -> None:
        """Leaves a planned sample out, for a stated reason."""
        self._decide(sample_id)
        self._skipped[sample_id] = reason

    def finish(self) -> ShardIndex:
        """Makes the shard visible: synced, renamed, digested, its index written last.

        StoreError when a planned sample is still undecided. A shard whose samples were all skipped
        has an index and no file.
        """
        if self.missing:
            raise StoreError(
                f"shard {self._name}: {len(self.missing)} samples undecided ({self.missing[0]})",
                wanted="every planned sample placed or skipped",
                next_step="this is a fault of the collector: please report it",
            )
        kept = [sample for sample in self._plan.values() if sample.id in self._digests]
        if self._skipped:
            with named(self._partial):
                self._compact(kept)
        path = self._folder / f"{self._name}.safetensors"
        with named(self._partial):
            os.fsync(self._file)
        self._close()
        digest = ""
        if kept:
            self._partial.rename(path)
            fsync_directory(self._folder)
            digest = sha256_file(path)
        else:
            self._partial.unlink()
        entries, offset = [], 0
        for sample in kept:
            sha, supervised = self._digests[sample.id]
            entries.append(
                Entry(sample.id, sample.split, path.name, offset, sample.length, supervised, sha)
            )
            offset += sample.length
        index = ShardIndex(path.name, offset, digest, tuple(entries), tuple(self._skipped.items()))
        index.write(self._folder / f"{self._name}.json")
        return index

    def abandon(self) -> None:
        """Closes and removes the partial file; safe to call at any time."""
        self._close()
        with contextlib.suppress(FileNotFoundError):
            self._partial.unlink()

    def _decide(self, sample_id: str) -> None:
        if sample_id not in self._plan:
            raise _refused(sample_id, "not planned in this shard", "a planned sample")
        if sample_id in self._digests or sample_id in self._skipped:
            raise _refused(sample_id, "decided twice", "one result a sample")

    def _compact(self, kept: Sequence[PlannedSample]) -> None:
        """Rewrites the partial file without the skipped samples' rows, in bounded memory."""
        layout = ShardLayout(self._fields, sum(sample.length for sample in kept))
        starts = layout.offsets()
        target = self._folder / f".{self._name}.compact.partial"
        file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(file, 0, layout.file_bytes)
            write_all(file, memoryview(layout.header()), 0)
            for field in self._fields:
                at = starts[field.name]
                for sample in kept:
                    source = self._starts[field.name] + self._offsets[sample.id] * field.row_bytes
                    left = sample.length * field.row_bytes
                    while left:
                        piece = os.pread(self._file, min(left, _COPY_BYTES), source)
                        write_all(file, memoryview(piece), at)
                        at, source, left = at + len(piece), source + len(piece), left - len(piece)
        except BaseException:
            os.close(file)
            target.unlink()
            raise
        self._close()
        target.replace(self._partial)
        self._file = file

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SampleWriter:
    """Writes prepared samples into shards of about `shard_tokens` rows, in the order they come."""

    def __init__(self, folder: Path, *, shard_tokens: int) -> None:
        self._folder, self._shard_tokens = folder, shard_tokens
        self._waiting: list[Sample] = []
        self._tokens = self._shards = 0

    def add(self, sample: Sample) -> None:
        """Takes a sample: input_ids int32 [n] and supervised bool [n] of one length n > 0."""
        self._waiting.append(sample)
        self._tokens += len(sample.input_ids)
        if self._tokens >= self._shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Writes what waits as one shard."""
        if not self._waiting:
            return
        plan = [PlannedSample(s.id, len(s.input_ids), s.split) for s in self._waiting]
        builder = ShardBuilder(
            self._folder, f"samples-{self._shards:05d}", fields=SAMPLE_FIELDS, plan=plan
        )
        try:
            for sample in self._waiting:
                rows = {"input_ids": sample.input_ids, "supervised": sample.supervised}
                builder.place(sample.id, rows)
            builder.finish()
        finally:
            builder.abandon()
        self._waiting, self._tokens = [], 0
        self._shards += 1


def write_all(file: int, data: memoryview, at: int) -> None:
    """Writes all of `data` at byte `at` of a file. OSError as the system gives it."""
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _refused(sample_id: str, found: str, wanted: str) -> StoreError:
    return StoreError(
        f"sample {sample_id}: {found}",
        wanted=wanted,
        next_step="this is a fault of the caller: please report it",
    )


def to_sample(
    sample_id: str, input_ids: Sequence[int], *, supervised: Sequence[bool], split: Split
) -> Sample:
    """A Sample from Python lists of one length. ValueError when the lengths differ or are 0."""
    if len(input_ids) != len(supervised) or not input_ids:
        raise ValueError(f"{sample_id}: {len(input_ids)} ids, {len(supervised)} mask values")
    return Sample(
        sample_id,
        torch.tensor(input_ids, dtype=torch.int32),
        torch.tensor(supervised, dtype=torch.bool),
        split,
    )
