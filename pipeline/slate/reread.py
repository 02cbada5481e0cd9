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
from pathlib import Path

PIECE_BYTES = 8 << 20
_PAGE = mmap.PAGESIZE
_CACHED_SHARE = 0.5  # of memory: more than that is not kept by the page cache anyhow


def past_the_cache(total_bytes: int) -> bool:
    """Whether files of so many bytes together are better read past the page cache."""
    return total_bytes > _CACHED_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_pieces(path: Path, *, direct: bool) -> Iterator[memoryview]:
    """The bytes of a plain file, in order; each piece holds until the next is asked for.

    direct: past the page cache where the file system can. OSError as the system gives it, also for
    a link or anything that is no plain file: neither is followed, nor waited for.
    """
    # Without waiting: a pipe in place of a file would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        if direct:
            direct = _set_direct(file, flags, True)
        # Of pages of its own: direct reads want such an address.
        size = min(PIECE_BYTES, -(-max(found.st_size, 1) // _PAGE) * _PAGE)
        buffer = memoryview(mmap.mmap(-1, size))
        at = 0
        while True:
            if not direct:
                os.posix_fadvise(file, at + size, size, os.POSIX_FADV_WILLNEED)
            try:
                got = os.preadv(file, [buffer], at)
            except OSError as error:
                # Some file systems say only now that they cannot, or after a read came in parts.
                if direct and error.errno == errno.EINVAL:
                    direct = _set_direct(file, flags, False)
                    continue
                error.filename = str(path)
                raise
            if got == 0:
                return
            yield buffer[:got]
            at += got
    finally:
        os.close(file)


def _set_direct(file: int, flags: int, wanted: bool) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags)
    except OSError:  # a file system without direct reads
        return False
    return wanted


def digest_once(path: Path, *, direct: bool, see: Callable[[memoryview], None]) -> str:
    """Hex sha256 of a plain file, read once; `see` gets every piece of it, in order.

    OSError as read_pieces.
    """
    digest = hashlib.sha256()
    for piece in read_pieces(path, direct=direct):
        digest.update(piece)
        see(piece)
    return digest.hexdigest()
