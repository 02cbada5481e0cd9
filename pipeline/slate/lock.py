"""One process a run root: an flock that the kernel releases however the holder ends."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.slate.errors import LockHeld, SlateError
from pipeline.slate.files import named

_PATIENCE_S = 2.0
"""A killed holder's lock lives on in a child that it was just starting, until that child's exec."""


@contextlib.contextmanager
def lock(root: Path, *, purpose: str, container: str | None = None) -> Iterator[None]:
    """Holds the run root's lock while the context lasts; waits for it no longer than _PATIENCE_S.

    container: the name of the one that this process runs in, named instead of its process id, which
    means nothing outside. LockHeld names the holder and its purpose; SlateError when the folder
    cannot be written.
    The file stays; the lock does not.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise SlateError(
            f"{root}: {error.strerror}",
            wanted="a folder that can be written, for the run",
            next_step="set run.root to one, or mend its permissions",
        ) from error
    try:
        if not _taken(handle):
            holder = os.pread(handle, 500, 0).decode(errors="replace").strip()
            stop = "end it (make release)" if '"container"' in holder else "stop it"
            raise LockHeld(
                f"{root} is in use by {holder or 'another process'}",
                wanted="one process at a time on a run",
                next_step=f"wait for it, or {stop}, or give this run another name (run.name)",
            )
        who = {"container": container} if container else {"pid": os.getpid()}
        with named(root / ".lock"):
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({**who, "purpose": purpose}).encode(), 0)
        yield
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True
