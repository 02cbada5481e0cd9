"""Looking for damage in shards: which samples, which fields, which rows."""

import errno
import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy

from pipeline.slate.reread import PIECE_BYTES, digest_once, past_the_cache
from pipeline.store.errors import ShardDamaged
from pipeline.store.index import Entry, Sample, ShardIndex, digest_head, tensor_bytes
from pipeline.store.layout import Field, ShardLayout, row_bytes, state_fields
from pipeline.store.reader import DatasetFacts, StateDataset

_BLOCK_BYTES = 256 << 10  # of rows judged at once: stays in a core's cache
_MAGNITUDE, _INFINITE = 0x7FFF, 0x7F80  # of bfloat16: all but the sign; from here on not finite


@dataclass(frozen=True)
class BadSample:
    """A sample that is not as it was sealed.

    field: of its tensors, and rows: first and last of the sample's rows, where they are known.
    """

    id: str
    what: str
    field: str | None = None
    rows: tuple[int, int] | None = None

    def __str__(self) -> str:
        place = f" {self.field}" if self.field else ""
        if self.rows:
            first, last = self.rows
            place += f" row {first}" if first == last else f" rows {first} to {last}"
        return f"{self.id}{place}: {self.what}"


class _Passing:
    """The tensors of a shard that passes by, piece for piece."""

    def __init__(self, layout: ShardLayout) -> None:
        self._places = [
            (field, start, start + field.row_bytes * layout.rows)
            for field, start in zip(layout.fields, layout.offsets().values(), strict=True)
        ]
        self._at, self._end = 0, layout.file_bytes

    @property
    def passed(self) -> bool:
        """Whether all of it has passed."""
        return self._at == self._end

    def fields_of(self, piece: memoryview) -> Iterator[tuple[Field, int, memoryview]]:
        """What of the next bytes belongs to which field, from which byte of that field on."""
        start, self._at = self._at, self._at + len(piece)
        for field, first, last in self._places:
            one, two = max(start, first), min(self._at, last)
            if one < two:
                yield field, one - first, piece[one - start : two - start]


class _DigestsWatch:
    """Sees a shard pass by, piece for piece, and takes the digest of each sample."""

    def __init__(self, index: ShardIndex, fields: Sequence[Field]) -> None:
        self._file = _Passing(ShardLayout(tuple(fields), index.rows))
        self._entries = index.entries
        self._starts = [entry.offset for entry in index.entries]
        self._digests = [hashlib.sha256() for _ in index.entries]

    def see(self, piece: memoryview) -> None:
        """The next bytes of the file."""
        for field, offset, data in self._file.fields_of(piece):
            self._take(field, offset, data)

    def _take(self, field: Field, offset: int, data: memoryview) -> None:
        # A sample's digest goes field by field, as the file does.
        while data:
            number = bisect_right(self._starts, offset // field.row_bytes) - 1
            entry, digest = self._entries[number], self._digests[number]
            first = entry.offset * field.row_bytes
            if offset == first:
                digest.update(digest_head(field.name, field.dtype, field.shape(entry.length)))
            size = min(len(data), first + entry.length * field.row_bytes - offset)
            digest.update(data[:size])
            offset, data = offset + size, data[size:]

    def right(self) -> bool:
        """Whether every sample's digest is that of the index, once all pieces have passed."""
        return all(
            digest.hexdigest() == entry.digest
            for entry, digest in zip(self._entries, self._digests, strict=True)
        )


class StatesWatch:
    """Sees a shard of states pass by, piece for piece, and finds rows that no capture gives.

    Those are states [N, H] bf16 that are not finite or all zero, and ids or masks that are not the
    prepared ones. prepared: gives a sample by its id, None where it is not known.
    """

    def __init__(
        self,
        index: ShardIndex,
        fields: Sequence[Field],
        prepared: Callable[[str], Sample | None],
    ) -> None:
        self._index, self._prepared = index, prepared
        self._file = _Passing(ShardLayout(tuple(fields), index.rows))
        self._rest = bytearray()  # of a row whose other bytes are in the next piece
        self._small = {field.name: bytearray() for field in fields if field.width is None}
        self._bad: dict[tuple[str, str], list[int]] = {}  # (field, what) -> rows of the shard
        self._others: dict[str, list[BadSample]] = {}

    def see(self, piece: memoryview) -> None:
        """The next bytes of the file."""
        for field, offset, data in self._file.fields_of(piece):
            self._take(field, offset, data)
        if self._file.passed:
            for entry in self._index.entries:
                self._others[entry.id] = list(self._compare(entry))
            self._small.clear()  # thousands of shards are looked at

    def _take(self, field: Field, offset: int, data: memoryview) -> None:
        if field.width is None:
            self._small[field.name] += data
            return
        row, begun = divmod(offset, field.row_bytes)
        if begun:
            missing = field.row_bytes - begun
            self._rest += data[:missing]
            if len(self._rest) < field.row_bytes:
                return
            self._judge(field, row, self._rest)
            row, data = row + 1, data[missing:]
        whole = len(data) - len(data) % field.row_bytes
        self._judge(field, row, data[:whole])
        self._rest = bytearray(data[whole:])

    def _judge(self, field: Field, row: int, data: memoryview | bytearray) -> None:
        values = numpy.frombuffer(data, dtype="<u2").reshape(-1, field.row_bytes // 2)
        step = max(1, _BLOCK_BYTES // field.row_bytes)
        for at in range(0, len(values), step):
            greatest = (values[at : at + step] & _MAGNITUDE).max(axis=1)
            for what, found in (("all zero", greatest == 0), ("not finite", greatest >= _INFINITE)):
                if found.any():
                    rows = self._bad.setdefault((field.name, what), [])
                    rows += [row + at + int(number) for number in found.nonzero()[0]]

    def found(self) -> list[BadSample]:
        """What was wrong, once all pieces have passed; in the order of the shard's samples."""
        found = {name: list(bad) for name, bad in self._others.items()}
        entries, starts = self._index.entries, [entry.offset for entry in self._index.entries]
        for (field, what), rows in self._bad.items():
            by_entry: dict[Entry, list[int]] = {}
            for row in rows:
                entry = entries[bisect_right(starts, row) - 1]
                by_entry.setdefault(entry, []).append(row - entry.offset)
            for entry, own in by_entry.items():
                bad = BadSample(entry.id, what, field, (min(own), max(own)))
                found.setdefault(entry.id, []).append(bad)
        return [bad for entry in entries for bad in found.get(entry.id, ())]

    def _compare(self, entry: Entry) -> Iterator[BadSample]:
        sample = self._prepared(entry.id)
        if sample is None:
            return
        for field, wanted in (("input_ids", sample.input_ids), ("supervised", sample.supervised)):
            size = wanted.element_size()
            start = entry.offset * size
            own = self._small[field][start : start + entry.length * size]
            if own == tensor_bytes(wanted):
                continue
            if len(wanted) != entry.length:
                yield BadSample(entry.id, f"{entry.length} rows, {len(wanted)} prepared", field)
                continue
            found = numpy.frombuffer(own, dtype=numpy.uint8).reshape(entry.length, size)
            right = numpy.frombuffer(tensor_bytes(wanted), dtype=numpy.uint8).reshape(found.shape)
            rows = (found != right).any(axis=1).nonzero()[0]
            place = (int(rows[0]), int(rows[-1]))
            yield BadSample(entry.id, "not as prepared", field, place)


def differing_samples(
    path: Path, index: ShardIndex, fields: tuple[Field, ...]
) -> tuple[list[BadSample], bool]:
    """The samples of a shard's file whose rows are not those of the index; is its header right?

    Reads and no map, so that a bad block or a file that ends early costs the samples that it
    touches and no more. No link is followed.
    """
    layout = ShardLayout(fields, index.rows)
    header, offsets = layout.header(), layout.offsets()
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        what = "is gone" if error.errno == errno.ENOENT else f"cannot be opened: {error.strerror}"
        return [BadSample(entry.id, f"its shard {what}") for entry in index.entries], False
    try:
        bad = [
            found
            for entry in index.entries
            if (found := _differs(file, entry, fields, offsets)) is not None
        ]
        try:
            right = os.pread(file, len(header), 0) == header
        except OSError:
            right = False
        return bad, right
    finally:
        os.close(file)


def _differs(
    file: int, entry: Entry, fields: tuple[Field, ...], offsets: dict[str, int]
) -> BadSample | None:
    digest = hashlib.sha256()
    for field in fields:
        digest.update(digest_head(field.name, field.dtype, field.shape(entry.length)))
        start = offsets[field.name] + entry.offset * field.row_bytes
        size = entry.length * field.row_bytes
        for at in range(0, size, PIECE_BYTES):
            wanted = min(PIECE_BYTES, size - at)
            try:
                data = os.pread(file, wanted, start + at)
            except OSError as error:
                rows = (at // field.row_bytes, (at + wanted - 1) // field.row_bytes)
                what = f"cannot be read: {error.strerror}"
                return BadSample(entry.id, what, field.name, rows)
            if len(data) < wanted:
                return BadSample(entry.id, "is cut off", field.name)
            digest.update(data)
    if digest.hexdigest() == entry.digest:
        return None
    return BadSample(entry.id, "its rows are not those of its digest")


def check_shard(
    folder: Path, index: ShardIndex, *, fields: tuple[Field, ...], direct: bool = False
) -> None:
    """Compares a shard's file and each sample's rows with the index; reads the file once.

    direct: past the page cache where the file system can. ShardDamaged names the samples whose rows
    differ or cannot be read, or says that only bytes outside them do.
    """
    if not index.entries:
        return
    path = folder / index.shard
    watch = _DigestsWatch(index, fields)
    try:
        digest = digest_once(path, direct=direct, see=watch.see)
        if digest == index.sha256 and watch.right():
            return
        what = "its bytes are not those of its index"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    bad, _ = differing_samples(path, index, fields)
    if bad:
        what = "; ".join(str(one) for one in bad[:5])
        what += f" (and {len(bad) - 5} more)" if len(bad) > 5 else ""
    raise ShardDamaged(
        f"{path}: {what}",
        wanted="the bytes that were written when the shard was made",
        next_step="make extract RESUME=1 captures that shard again, or make repair if it is sealed "
        "(a damaged disk? see dmesg)",
    )


def check_states(folder: Path, *, threads: int) -> Iterator[int]:
    """Compares every shard of a dataset with its index; yields rows as shards are done.

    ShardDamaged at the first shard that differs. Reads everything once, `threads` shards at a time.
    """
    facts = DatasetFacts.read(folder)
    fields = state_fields(facts.hidden_size, taps=len(facts.taps))
    indexes = StateDataset(folder).indexes
    direct = past_the_cache(sum(index.rows for index in indexes) * row_bytes(fields))

    def check(index: ShardIndex) -> int:
        check_shard(folder, index, fields=fields, direct=direct)
        return index.rows

    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(check, indexes)
