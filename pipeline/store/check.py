"""Looking for damage in shards: which samples, which fields, which rows."""

import errno
import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from pipeline.slate.reread import PIECE_BYTES
from pipeline.store.index import Entry, Sample, ShardIndex, digest_head, tensor_bytes
from pipeline.store.layout import Field, ShardLayout

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
        layout = ShardLayout(tuple(fields), index.rows)
        self._index, self._prepared = index, prepared
        self._places = [
            (field, start, start + field.row_bytes * index.rows)
            for field, start in zip(fields, layout.offsets().values(), strict=True)
        ]
        self._at, self._end = 0, layout.file_bytes
        self._rest = bytearray()  # of a row whose other bytes are in the next piece
        self._small = {field.name: bytearray() for field in fields if field.width is None}
        self._bad: dict[tuple[str, str], list[int]] = {}  # (field, what) -> rows of the shard
        self._others: dict[str, list[BadSample]] = {}

    def see(self, piece: memoryview) -> None:
        """The next bytes of the file."""
        start, self._at = self._at, self._at + len(piece)
        for field, first, last in self._places:
            one, two = max(start, first), min(self._at, last)
            if one < two:
                self._take(field, one - first, piece[one - start : two - start])
        if self._at == self._end:
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
