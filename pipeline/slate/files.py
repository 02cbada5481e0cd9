"""Files that are whole or not there, and their digests."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pipeline.slate.errors import SlateError

_CHUNK_BYTES = 8 << 20


def fsync_directory(path: Path) -> None:
    """Makes renames and creations in a directory durable. OSError as the system gives it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file that is seen either whole or not at all.

    A temporary file beside the target is written, synced and renamed over it; the temporary file
    is removed when any step fails. OSError as the system gives it (disk full among them).
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, no NaN. ValueError on NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    ).encode()


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file for people and programs, atomically. ValueError on NaN."""
    text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False)
    write_atomic(path, text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file. SlateError when it is absent, cut or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SlateError(
            f"{path}: {type(error).__name__}: {error}",
            wanted="a readable JSON file",
            next_step="run the stage that writes it again",
        ) from error


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes, read in pieces. OSError as the system gives it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex digest of a JSON value in its canonical spelling."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
