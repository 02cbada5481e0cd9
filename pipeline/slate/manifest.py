"""The seal: a manifest written last, and the proof that what it lists is still there."""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pipeline.slate.errors import Damaged, NotSealed, SlateError
from pipeline.slate.files import (
    canonical_json,
    fsync_directory,
    fsync_file,
    read_json,
    sha256_file,
    sha256_json,
    write_json,
)
from pipeline.slate.reread import digest_once, past_the_cache
from pipeline.slate.wipe import MANIFEST, MARKER

_FORMAT = 1
_PARTS = ("settings", "inputs", "counts", "facts", "provenance")


@dataclass(frozen=True)
class SealedFile:
    """A file of an output: size in bytes, sha256, and whether it counts towards the digest.

    A volatile file (metrics with times in them, say) is proven whole but is not part of what the
    output *is*.
    """

    bytes: int
    sha256: str
    volatile: bool


@dataclass(frozen=True)
class Manifest:
    """What a sealed output is and how it came to be.

    settings: those that decide the output. inputs: name -> digest of each input. counts: records,
    samples, tokens; read = kept + skipped where both appear. facts: what is true of the output.
    provenance: versions, commit, host, times: true of the run, not of the output.
    """

    stage: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    counts: Mapping[str, Any]
    facts: Mapping[str, Any]
    files: Mapping[str, SealedFile]
    provenance: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Digest of everything that makes the output what it is; equal for an equal rerun."""
        value = {key: getattr(self, key) for key in ("stage", "settings", "inputs", "counts")}
        value["facts"] = self.facts
        value["files"] = {
            name: [file.bytes, file.sha256]
            for name, file in self.files.items()
            if not file.volatile
        }
        return sha256_json(value)

    @property
    def intent(self) -> dict[str, Any]:
        """What the output was made from."""
        return {"settings": dict(self.settings), "inputs": dict(self.inputs)}

    def write(self, directory: Path) -> None:
        """Seals a directory. OSError as the system gives it; nothing is sealed then."""
        body = {"format": _FORMAT, **asdict(self), "digest": self.digest}
        try:
            write_json(directory / MANIFEST, {**body, "self_sha256": sha256_json(body)})
        except BaseException:
            # The rename may be done and only its fsync have failed: who reports an error must not
            # leave a seal behind.
            (directory / MANIFEST).unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads a seal. NotSealed when there is none or it was changed."""
        path = directory / MANIFEST
        if not path.is_file():
            raise NotSealed(
                f"{directory} is not sealed (no {MANIFEST})",
                wanted="the sealed output of a finished stage",
                next_step=f"make {directory.name}, or make {directory.name} RESUME=1 to continue",
            )
        body = read_json(path)
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise _changed(path, "format")
        if body.pop("self_sha256", None) != sha256_json(body):
            raise _changed(path, "its own digest")
        try:
            files = {name: _sealed_file(name, file) for name, file in body["files"].items()}
            manifest = cls(files=files, stage=body["stage"], **{key: body[key] for key in _PARTS})
            if not all(isinstance(body[key], dict) for key in _PARTS):
                raise TypeError(f"{', '.join(_PARTS)}: not all of them are objects")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _changed(path, f"its form ({type(error).__name__}: {error})") from error
        return manifest


def _sealed_file(name: str, value: Any) -> SealedFile:
    """TypeError or ValueError for what is none, or lies outside the folder."""
    file = SealedFile(**value)
    if name.startswith("/") or {"..", "."} & {*name.split("/")} or "\0" in name:
        raise ValueError(f"file {name!r}")
    if type(file.bytes) is not int or not isinstance(file.sha256, str):
        raise TypeError(f"file {name!r}: {value}")
    return file


def _changed(path: Path, what: str) -> NotSealed:
    return Damaged(
        f"{path} does not match {what}",
        wanted="a manifest as this version sealed it",
        next_step=f"run the stage again: make {path.parent.name}",
    )


def seal_files(
    directory: Path, *, known: Mapping[str, str], volatile: Callable[[str], bool], threads: int
) -> dict[str, SealedFile]:
    """Sizes and digests of every file below a directory but the marker, made durable by fsync.

    known: digests that the stage has just verified itself, by relative name; not computed twice.
    SlateError when a partial file or anything that is no plain file lies there; OSError as the
    system gives it.
    """
    names = []
    folders = [directory]
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() and not path.is_symlink():
            folders.append(path)
            continue
        if name == MARKER:
            continue
        if path.is_symlink() or not path.is_file() or path.name.startswith("."):
            raise SlateError(
                f"{path} is a {'link' if path.is_symlink() else 'partial or special file'}",
                wanted="whole plain files only",
                next_step=f"see who put it there, remove it, then: make {directory.name}",
            )
        names.append(name)

    def look(name: str) -> SealedFile:
        fsync_file(directory / name)  # libraries write some of them, and sync none
        digest = known.get(name) or sha256_file(directory / name)
        return SealedFile((directory / name).stat().st_size, digest, volatile(name))

    with ThreadPoolExecutor(threads) as pool:
        files = dict(zip(names, pool.map(look, names), strict=True))
    for folder in folders:
        fsync_directory(folder)
    return files


def changed_files(
    directory: Path,
    manifest: Manifest,
    *,
    threads: int,
    advance: Callable[[int], None],
    direct: bool | None = None,
    watch: Callable[[str], Callable[[memoryview], None]] = lambda _name: lambda _piece: None,
) -> list[tuple[str, str]]:
    """(name, what is wrong) for all that differs from the seal, sorted by name.

    That is: a listed file that is absent, no plain file, of another size or unreadable, or differs
    in a byte; and whatever lies there that nobody sealed (the marker apart). Every file is read
    once, the largest first, `threads` at a time in pieces of a few MiB.
    advance: called with bytes as they are looked at. direct: past the page cache; None: when the
    files together are larger than half of the memory. watch: gives for a file's name what is to see
    its pieces, in order; called in threads.
    """
    present, bad = _listing(directory, manifest.files)
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    if direct is None:
        direct = past_the_cache(sum(sizes.values()))
    guard, stopped = threading.Lock(), threading.Event()

    def count(number: int) -> None:
        if stopped.is_set():
            raise _Stopped
        with guard:
            advance(number)

    def look(name: str) -> str:
        found, wanted = present.get(name), manifest.files[name]
        if found is None or found.what:
            count(wanted.bytes)
            return "is gone" if found is None else found.what
        if found.bytes != wanted.bytes:
            count(wanted.bytes)
            return f"has {found.bytes} bytes, {wanted.bytes} were sealed"
        see = watch(name)

        def both(piece: memoryview) -> None:
            see(piece)
            count(len(piece))

        try:
            digest = digest_once(directory / name, direct=direct, see=both)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        return "" if digest == wanted.sha256 else "has other bytes than were sealed (same size)"

    # The largest first: none of them is begun when all other threads have nothing left to do.
    order = sorted(sizes, key=lambda name: -sizes[name])
    pool = ThreadPoolExecutor(threads)
    try:
        bad += [
            (name, what) for name, what in zip(order, pool.map(look, order), strict=True) if what
        ]
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
    return sorted(bad)


class _Stopped(Exception):
    """The one who asked does not wait any more."""


@dataclass(frozen=True)
class _Found:
    """Something below a directory: its size, and what it is where it is no plain file."""

    bytes: int
    what: str = ""


def _listing(
    directory: Path, sealed: Mapping[str, Any]
) -> tuple[dict[str, _Found], list[tuple[str, str]]]:
    """All that lies below a directory, by name; and what of it nobody sealed. No link is followed.

    A folder is sealed by the files below it.
    """
    folders = {parent.as_posix() for name in sealed for parent in PurePosixPath(name).parents}
    found: dict[str, _Found] = {}
    extra: list[tuple[str, str]] = []

    def enter(folder: Path) -> None:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            name = folder.relative_to(directory).as_posix()
            extra.append((name, f"cannot be listed: {error.strerror}"))
            return
        for entry in entries:
            path = Path(entry.path)
            name = path.relative_to(directory).as_posix()
            if name in (MARKER, MANIFEST):
                continue
            if entry.is_dir(follow_symlinks=False) and name in folders:
                enter(path)
                continue
            size, what = 0, ""
            if entry.is_symlink():
                what = "is a link"
            elif not entry.is_file(follow_symlinks=False):
                what = "is no plain file"
            else:
                size = entry.stat(follow_symlinks=False).st_size
            if name in sealed:
                found[name] = _Found(size, what)
            elif name in folders:
                extra.append((name, f"{what}, a folder was sealed"))
            else:
                extra.append((name, "was not there when the output was sealed"))

    if directory.is_symlink():
        extra.append((".", "is a link, a folder was sealed"))
    enter(directory)
    return found, extra


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Where two nested mappings differ, one line a leaf: `key: found x, wanted y`."""
    lines: list[str] = []
    for key in sorted({*wanted, *found}):
        a, b = wanted.get(key), found.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += [f"{key}.{line}" for line in differences(a, b)]
        elif canonical_json(a) != canonical_json(b):
            lines.append(f"{key}: found {_short(b)}, wanted {_short(a)}")
    return lines


def _short(value: Any) -> str:
    text = canonical_json(value).decode()
    return (
        text
        if len(text) <= 80
        else f"{text[:60]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    )
