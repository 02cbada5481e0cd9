"""Rows of shards read straight into memory that the caller owns.

Reads and not maps: under a map a cut file or a bad block is a signal that ends the process without
a word, where a read is an error that can name the file and the sample. It also lets many reads be
under way at once, and lets a dataset that no memory can hold go past the page cache
(benchmarks/loader: more MB/s for a fifth of the processor time).
"""

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.store.errors import ShardDamaged
from pipeline.store.index import Entry
from pipeline.store.layout import ShardLayout

DIRECT_ALIGNMENT = 4096
"""Bytes; offset, length and memory of a direct read are multiples of it on every usual disk."""

# The disk wants another alignment (also for the rest of a read that came in parts), or cannot reach
# this memory: then through the page cache.
_NOT_DIRECT = (errno.EINVAL, errno.EFAULT)
_OPEN_SHARDS = 128  # two descriptors each: far below the usual limit of 1024
_CACHED_SHARE = 0.5  # of memory: a larger dataset is not kept by the page cache from epoch to epoch


def open_shard(path: Path, *, layout: ShardLayout) -> int:
    """A descriptor of a shard whose size and header are those of `layout`. Errors: ShardDamaged."""
    header = layout.header()
    file = -1
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        size = os.fstat(file).st_size
        found = os.pread(file, len(header), 0)
    except OSError as error:
        if file >= 0:
            os.close(file)
        raise ShardDamaged(
            f"{path}: {error.strerror}",
            wanted="a readable shard",
            next_step=f"make verify says what else is lost; make {path.parent.name} makes it anew",
        ) from error
    if size != layout.file_bytes or found != header:
        os.close(file)
        raise ShardDamaged(
            f"{path}: {size} bytes, header {'as' if found == header else 'not as'} its index says",
            wanted=f"{layout.file_bytes} bytes, {layout.rows} rows",
            next_step=f"make verify says what else is lost; make {path.parent.name} makes it anew",
        )
    return file


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one field of one sample: bytes [start, start + size) of its shard."""

    entry: Entry
    field: str
    start: int
    size: int


class _Open:
    """Descriptors of one shard; closed with the last user, also when it was let go meanwhile."""

    def __init__(self, path: Path, *, layout: ShardLayout, direct: bool) -> None:
        self.path = path
        self.buffered = self.direct = -1  # for __del__, should the next line fail
        self.buffered = open_shard(path, layout=layout)
        if direct:
            # A file system may have no direct reads: then through the page cache.
            with contextlib.suppress(OSError):
                self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def __del__(self) -> None:
        for file in (self.buffered, self.direct):
            if file >= 0:
                os.close(file)
        self.buffered = self.direct = -1


class RowFiles:
    """The shards of one folder, for reading rows by several threads at once.

    layouts: by shard name. direct: past the page cache; None: when the shards together are larger
    than half of the memory. At most 128 shards are open, whatever their number.
    """

    def __init__(
        self, folder: Path, layouts: Mapping[str, ShardLayout], *, direct: bool | None = None
    ) -> None:
        self._folder, self._layouts = folder, layouts
        self._offsets = {name: layout.offsets() for name, layout in layouts.items()}
        self._row_bytes = {
            field.name: field.row_bytes for layout in layouts.values() for field in layout.fields
        }
        if direct is None:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            total = sum(layout.file_bytes for layout in layouts.values())
            direct = total > _CACHED_SHARE * memory
        self.direct = direct
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def alignment(self) -> int:
        """Reads of states should begin and end at multiples of this many bytes of the file."""
        return DIRECT_ALIGNMENT if self.direct else 1

    def row_bytes(self, field: str) -> int:
        """Bytes of one row of a field."""
        return self._row_bytes[field]

    def rows(self, entry: Entry, field: str, first: int, count: int) -> Rows:
        """Where rows [first, first + count) of a sample's field lie."""
        assert 0 <= first < first + count <= entry.length
        size = self._row_bytes[field]
        start = self._offsets[entry.shard][field] + (entry.offset + first) * size
        return Rows(entry, field, start, count * size)

    def announce(self, rows: Rows) -> None:
        """Has the page cache fetch rows that `read_cached` will ask for."""
        os.posix_fadvise(self._shard(rows).buffered, rows.start, rows.size, os.POSIX_FADV_WILLNEED)

    def read_cached(self, rows: Rows, into: memoryview) -> None:
        """Reads through the page cache into exactly `rows.size` bytes: for small fields."""
        self._fill(self._shard(rows), rows, start=rows.start, into=into, direct=False)

    def read(self, rows: Rows, into: memoryview) -> None:
        """Reads the aligned bytes around `rows`, the first of them at the start of `into`.

        into: from start rounded down to end rounded up, both by `alignment`; with direct reads at
        an address that is a multiple of it. Errors: ShardDamaged.
        """
        shard = self._shard(rows)
        start = rows.start - rows.start % self.alignment
        direct = shard.direct >= 0
        if not direct:
            # One request of the whole size instead of the many of read-ahead.
            os.posix_fadvise(shard.buffered, start, len(into), os.POSIX_FADV_WILLNEED)
        self._fill(shard, rows, start=start, into=into, direct=direct)

    def _shard(self, rows: Rows) -> _Open:
        name = rows.entry.shard
        with self._lock:
            shard = self._open.get(name)
            if shard is None:
                shard = _Open(self._folder / name, layout=self._layouts[name], direct=self.direct)
                self._open[name] = shard
                if len(self._open) > _OPEN_SHARDS:
                    self._open.popitem(last=False)
            self._open.move_to_end(name)
        return shard

    def _fill(
        self, shard: _Open, rows: Rows, *, start: int, into: memoryview, direct: bool
    ) -> None:
        """Fills `into` from byte `start` on, at least up to the end of `rows`."""
        wanted, done = rows.start + rows.size - start, 0
        while done < wanted:
            file = shard.direct if direct else shard.buffered
            try:
                got = os.preadv(file, [into[done:]], start + done)
            except OSError as error:
                if direct and error.errno in _NOT_DIRECT:
                    direct = False
                    continue
                raise _unreadable(shard, rows, error.strerror or str(error)) from error
            if got == 0:
                found = f"{max(0, done - (rows.start - start))} bytes before the file's end"
                raise _unreadable(shard, rows, found)
            done += got


def _unreadable(shard: _Open, rows: Rows, found: str) -> ShardDamaged:
    return ShardDamaged(
        f"{shard.path}: {rows.field} of sample {rows.entry.id}, byte {rows.start}: {found}",
        wanted=f"{rows.size} bytes, as when the shard was opened",
        next_step="look at the disk (dmesg), then: make verify; lost rows need: make extract",
    )
