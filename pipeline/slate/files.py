"""Files that are whole or not there, and their digests."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.host.disk import existing_parent, free_bytes
from pipeline.settings.strict_json import parse_json, read_plain
from pipeline.slate.errors import DiskFault, SlateError

_CHUNK_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a disk, a quota or a folder's permissions do to a right program; all else is our own fault.
_OF_THE_DISK = (
    *(*_FULL, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT, errno.EISDIR),
    *(errno.EMFILE, errno.ENFILE, errno.EBUSY),
)
_REPAIR = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user the right to it (namei -l)"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    errno.ENAMETOOLONG: "name a shorter path",
}


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Gives an OSError that has no file name (of a write, an fsync, a read) this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def disk_fault(error: OSError, *, place: Path, next_step: str) -> DiskFault | None:
    """What the disk did, for a person; None when it was not the disk.

    place: named where the error names no file. next_step: what to do when the disk is right again.
    """
    if error.errno not in _OF_THE_DISK:
        return None
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else place
    room = ""
    with contextlib.suppress(OSError):
        room = f" ({free_bytes(path) >> 20} MiB free in {existing_parent(path)})"
    full = error.errno in _FULL
    repair = _REPAIR.get(error.errno, "repair it (dmesg, mount)")
    return DiskFault(
        f"{path}: {error.strerror}{room}",
        wanted="room for it" if full else "files and folders that can be read and written",
        next_step=("make room there (df -h, df -i, quota)" if full else repair)
        + f", then: {next_step}",
    )


def fsync_directory(path: Path) -> None:
    """Makes renames and creations in a directory durable. OSError as the system gives it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with named(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def fsync_file(path: Path) -> None:
    """Makes a file's bytes durable, whoever wrote them. OSError, naming the file."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        with named(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file that is seen either whole or not at all; one writer of a file at a time.

    A hidden file beside the target is written, synced and renamed over it; it is removed when any
    step fails. OSError, naming the file (disk full among them).
    """
    temporary = partial_of(path)
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # of a killed process
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with named(path), os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o644)  # whatever the umask is
            file.write(data)
            file.flush()
            os.fsync(handle)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def partial_of(path: Path) -> Path:
    """Where `write_atomic` builds a file."""
    return path.with_name(f".{path.name}.partial")


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, no NaN. ValueError on NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    ).encode()


def json_bytes(value: Any) -> bytes:
    """A JSON value as `write_json` spells it, for people and programs. ValueError on NaN."""
    text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False)
    return text.encode() + b"\n"


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically. ValueError on NaN."""
    write_atomic(path, json_bytes(value))


def read_json(path: Path) -> Any:
    """Reads a JSON file. SlateError: absent, cut, not JSON (`parse_json`) or too large."""
    try:
        return parse_json(read_plain(path))
    except (OSError, ValueError) as error:
        raise SlateError(
            f"{path}: {type(error).__name__}: {error}",
            wanted="a readable JSON file",
            next_step="if a stage wrote it (its folder has the stage's name): make that stage; "
            "else correct the file",
        ) from error


def read_through(path: Path, *, start: int = 0, end: int | None = None) -> None:
    """Sees that a file's bytes [start, end) can be read. OSError, naming the file, when not.

    For what is mapped next: under a map, bytes that cannot be read end the process without a word.
    """
    left = (path.stat().st_size if end is None else end) - start
    piece = memoryview(bytearray(min(left, _CHUNK_BYTES)))
    with named(path), path.open("rb", buffering=0) as file:
        file.seek(start)
        while left:
            size = file.readinto(piece[:left])
            if not size:
                raise OSError(errno.EIO, f"it ends {left} bytes early")
            left -= size


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes, read in pieces. OSError as the system gives it."""
    digest = hashlib.sha256()
    with named(path), path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex digest of a JSON value in its canonical spelling."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
