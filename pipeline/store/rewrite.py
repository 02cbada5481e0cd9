"""A sealed shard written again beside itself: rows that are right are kept, others are replaced."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.slate.files import fsync_directory, sha256_file
from pipeline.store.errors import ShardDamaged
from pipeline.store.index import Entry, ShardIndex, sample_digest, tensor_bytes
from pipeline.store.layout import Field, ShardLayout
from pipeline.store.writer import write_all


def read_rows(
    path: Path, index: ShardIndex, entry: Entry, *, fields: Sequence[Field]
) -> dict[str, Tensor]:
    """One sample's rows of a shard's file, every field, in memory of their own.

    Reads and no map. OSError as the system gives it; ShardDamaged when the file ends before.
    """
    offsets = ShardLayout(tuple(fields), index.rows).offsets()
    rows = {}
    with path.open("rb", buffering=0) as file:
        for field in fields:
            data = bytearray(entry.length * field.row_bytes)
            start = offsets[field.name] + entry.offset * field.row_bytes
            view, done = memoryview(data), 0
            while done < len(data):
                got = os.preadv(file.fileno(), [view[done:]], start + done)
                if not got:
                    raise ShardDamaged(
                        f"{path} ends inside {field.name} of sample {entry.id}",
                        wanted=f"{entry.length} rows",
                        next_step="make verify says what is lost",
                    )
                done += got
            flat = torch.frombuffer(data, dtype=field.dtype)
            rows[field.name] = flat.view(field.shape(entry.length))
    return rows


def rewrite_shard(
    path: Path,
    index: ShardIndex,
    new: Mapping[str, Callable[[], dict[str, Tensor]]],
    *,
    fields: tuple[Field, ...],
    scratch: Path,
) -> ShardIndex:
    """Puts a shard's file in place anew, and gives its index, which is not written.

    path: the file as it is, which may be damaged, cut, a link or gone. new: gives the rows of each
    sample that is to be replaced, by id; those of all others are copied, and proven on the way.
    scratch: a folder on the same file system, for the file until it is whole. ShardDamaged when a
    sample that is not in `new` differs from its digest: `path` is as it was then. One sample is in
    memory at a time.
    """
    layout = ShardLayout(fields, index.rows)
    offsets, entries = layout.offsets(), []
    partial = scratch / f".{path.name}.partial"
    file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        os.posix_fallocate(file, 0, layout.file_bytes)
        write_all(file, memoryview(layout.header()), 0)
        for entry in index.entries:
            asked = new.get(entry.id)
            rows = asked() if asked else read_rows(path, index, entry, fields=fields)
            digest = sample_digest(fields, rows)
            if asked is None and digest != entry.digest:
                raise ShardDamaged(
                    f"{path}: rows of {entry.id} differ from their digest",
                    wanted="rows that were right a moment ago: is the disk failing (dmesg)?",
                    next_step="make repair again",
                )
            for field in fields:
                start = offsets[field.name] + entry.offset * field.row_bytes
                write_all(file, tensor_bytes(rows[field.name]), start)
            entries.append(replace(entry, digest=digest, supervised=int(rows["supervised"].sum())))
        os.fsync(file)
    finally:
        os.close(file)
    found = replace(index, sha256=sha256_file(partial), entries=tuple(entries))
    partial.replace(path)
    fsync_directory(path.parent)
    return found


def rebuild_index(
    path: Path, members: Sequence[Entry], *, sha256: str, fields: tuple[Field, ...]
) -> ShardIndex | None:
    """The index of a whole shard's file that holds these samples end to end; None if it cannot.

    members: prepared samples. sha256: of the file, proven by the caller.
    """
    rows = sum(entry.length for entry in members)
    if path.stat().st_size != ShardLayout(fields, rows).file_bytes:
        return None
    bare = ShardIndex(path.name, rows, sha256, ())
    entries, offset = [], 0
    for member in members:
        entry = replace(member, shard=path.name, offset=offset)
        digest = sample_digest(fields, read_rows(path, bare, entry, fields=fields))
        entries.append(replace(entry, digest=digest))
        offset += entry.length
    return replace(bare, entries=tuple(entries))
