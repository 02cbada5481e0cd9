"""The seal: a manifest written last, and the proof that what it lists is still there."""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pipeline.slate.errors import NotSealed, SlateError
from pipeline.slate.files import canonical_json, read_json, sha256_file, sha256_json, write_json
from pipeline.slate.wipe import MANIFEST, MARKER

_FORMAT = 1


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
        write_json(directory / MANIFEST, {**body, "self_sha256": sha256_json(body)})

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
        files = {name: SealedFile(**file) for name, file in body["files"].items()}
        keys = ("stage", "settings", "inputs", "counts", "facts", "provenance")
        return cls(files=files, **{key: body[key] for key in keys})


def _changed(path: Path, what: str) -> NotSealed:
    return NotSealed(
        f"{path} does not match {what}",
        wanted="a manifest as this version sealed it",
        next_step=f"run the stage again: make {path.parent.name}",
    )


def seal_files(
    directory: Path, *, known: Mapping[str, str], volatile: Callable[[str], bool], threads: int
) -> dict[str, SealedFile]:
    """Sizes and digests of every file below a directory, but the marker and hidden partial files.

    known: digests that the stage has just verified itself, by relative name; not computed twice.
    SlateError when a partial file or anything that is no plain file lies there.
    """
    names = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if name == MARKER:
            continue
        if path.is_symlink() or not path.is_file() or name.endswith(".partial"):
            raise SlateError(
                f"{path} is a {'link' if path.is_symlink() else 'partial or special file'}",
                wanted="whole plain files only",
                next_step="this is a fault of the stage: please report it",
            )
        names.append(name)

    def look(name: str) -> SealedFile:
        digest = known.get(name) or sha256_file(directory / name)
        return SealedFile((directory / name).stat().st_size, digest, volatile(name))

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(look, names), strict=True))


def changed_files(
    directory: Path, manifest: Manifest, *, threads: int, advance: Callable[[int], None]
) -> list[tuple[str, str]]:
    """(name, what is wrong) for every listed file that is absent or differs, byte for byte.

    advance: called with the bytes looked at, from worker threads' results in order.
    """

    def look(item: tuple[str, SealedFile]) -> tuple[str, str, int]:
        name, file = item
        path = directory / name
        if not path.is_file():
            return name, "is gone", file.bytes
        size = path.stat().st_size
        if size != file.bytes:
            return name, f"has {size} bytes, {file.bytes} were sealed", file.bytes
        if sha256_file(path) != file.sha256:
            return name, "has other bytes than were sealed (same size)", file.bytes
        return name, "", file.bytes

    bad = []
    with ThreadPoolExecutor(threads) as pool:
        for name, what, size in pool.map(look, manifest.files.items()):
            advance(size)
            if what:
                bad.append((name, what))
    return bad


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
