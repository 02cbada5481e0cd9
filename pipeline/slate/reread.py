"""Reading a file once, from its start to its end, to see whether it is still what was sealed.

Past the page cache where that is asked for: then the disk is read and not what memory remembers of
it, other work keeps its cache, and a read costs a fraction of the processor time
(benchmarks/verify).
"""

import errno
import fcntl
import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

PIECE_BYTES = 8 << 20
_PAGE = mmap.PAGESIZE
_CACHED_SHARE = 0.5  # of memory: more than that is not kept by the page cache anyhow


def past_the_cache(total_bytes: int) -> bool:
    """Whether files of so many bytes together are better read past the page cache."""
    return total_bytes > _CACHED_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _File:
    """A plain file that is open for reading, past the page cache where the file system can.

    OSError as the system gives it, also for a link or anything that is no plain file: neither is
    followed, nor waited for.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self._path = path
        # Without waiting: a pipe in place of a file would wait for a writer.
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(path, self._flags)
        try:
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(path))
        except BaseException:
            self.close()
            raise
        self.bytes = found.st_size
        self._direct = direct and self._set_direct(True)

    def read(self, buffer: memoryview, at: int) -> memoryview:
        """The bytes from `at` on, as many as the system gives at once; none at the end."""
        if not self._direct:
            os.posix_fadvise(self._file, at + len(buffer), len(buffer), os.POSIX_FADV_WILLNEED)
        try:
            return buffer[: os.preadv(self._file, [buffer], at)]
        except OSError as error:
            # Some file systems say only now that they cannot, or after a read came in parts.
            if self._direct and error.errno == errno.EINVAL:
                self._direct = self._set_direct(False)
                return self.read(buffer, at)
            error.filename = str(self._path)
            raise

    def _set_direct(self, wanted: bool) -> bool:
        try:
            flags = self._flags | os.O_DIRECT if wanted else self._flags
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
        except OSError:  # a file system without direct reads
            return False
        return wanted

    def close(self) -> None:
        os.close(self._file)


def _pieces(file: _File, helpers: ThreadPoolExecutor) -> Iterator[memoryview]:
    """The bytes of a file, in order; each piece holds until the next is asked for.

    While one is looked at, a helper reads the next.
    """
    # Of pages of its own: direct reads want such an address.
    size = min(PIECE_BYTES, -(-max(file.bytes, 1) // _PAGE) * _PAGE)
    this, other = (memoryview(mmap.mmap(-1, size)) for _ in range(2))
    at = 0
    piece = file.read(this, at)
    while piece:
        at += len(piece)
        # What fits into one piece is read by now: its end is asked for here.
        ahead = helpers.submit(file.read, other, at) if at < file.bytes else None
        yield piece
        this, other = other, this
        piece = ahead.result() if ahead else file.read(this, at)


def digest_once(path: Path, *, direct: bool, see: Callable[[memoryview], None]) -> str:
    """Hex sha256 of a plain file, read once; `see` gets every piece of it, in order.

    The next piece is read while this one is hashed, and hashed while it is seen: one file alone
    goes as fast as the slowest of the three. direct: past the page cache where the file system can.
    OSError as the system gives it, also for a link or anything that is no plain file.
    """
    digest = hashlib.sha256()
    with closing(_File(path, direct=direct)) as file, ThreadPoolExecutor(2) as helpers:
        for piece in _pieces(file, helpers):
            hashed = helpers.submit(digest.update, piece)
            try:
                see(piece)
            finally:
                hashed.result()
    return digest.hexdigest()
