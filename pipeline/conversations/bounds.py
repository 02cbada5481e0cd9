"""A bound on memory for a stretch of work that is done with what a stranger wrote."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")


@contextmanager
def limited_memory(room_bytes: int) -> Iterator[None]:
    """Inside, this process can ask for so much more than it has; beyond that is a MemoryError."""
    pages = int(_STATM.read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + room_bytes
    try:
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
