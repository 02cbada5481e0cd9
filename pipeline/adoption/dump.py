"""What lies in a dump: its requests and their files, by name, size and time; nothing is opened.

A dump is a folder of `req_N` folders, each with `aux_0.pt`, `aux_1.pt`, `aux_2.pt` and `final.pt`.
Links are not followed: what a link leads to may change, or be another disk's.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pipeline.adoption.errors import AdoptionError

FILES = ("aux_0.pt", "aux_1.pt", "aux_2.pt", "final.pt")
_REQUEST = re.compile(r"req_(\d{1,18})")
_LISTING_THREADS = 16  # a listing waits for the disk, not for a core


@dataclass(frozen=True)
class Request:
    """One `req_N` folder: its number, and [size in bytes, mtime in ns] of each of FILES.

    A file that is absent is None. problem: why it cannot be looked at (a link, a special file).
    """

    name: str
    number: int
    files: tuple[tuple[int, int] | None, ...]
    problem: str = ""

    @property
    def key(self) -> list[list[int] | None]:
        """What tells whether it is still the same, for the journal."""
        return [list(file) if file else None for file in self.files]

    @property
    def bytes(self) -> int:
        """Size of its files together."""
        return sum(file[0] for file in self.files if file)


@dataclass(frozen=True)
class Dump:
    """All requests, by rising number; others: entries of the folder that are no requests."""

    root: Path
    requests: tuple[Request, ...]
    others: int

    @classmethod
    def scan(cls, root: Path) -> Self:
        """Lists a dump. AdoptionError when it is none."""
        root = root.absolute()  # not resolved: a container sees a mount there and no link
        try:
            names = os.listdir(root)  # noqa: PTH208  names alone
        except OSError as error:
            raise AdoptionError(
                f"{root}: {error.strerror}",
                wanted="a folder with req_0, req_1, ...",
                next_step="make adopt DUMP=/path/of/the/dump",
            ) from error
        numbers = {name: int(match[1]) for name in names if (match := _REQUEST.fullmatch(name))}
        if not numbers:
            raise AdoptionError(
                f"{root} holds {len(names)} entries, none of them named req_N",
                wanted=f"folders req_0, req_1, ... with {', '.join(FILES)} in each",
                next_step="make adopt DUMP=/path/of/the/dump, the folder that holds req_0",
            )
        order = sorted(numbers, key=lambda name: (numbers[name], name))
        with ThreadPoolExecutor(_LISTING_THREADS) as pool:
            found = pool.map(lambda name: _look(root, name, numbers[name]), order)
            return cls(root, tuple(found), len(names) - len(numbers))

    @property
    def bytes(self) -> int:
        """Size of all requests together."""
        return sum(request.bytes for request in self.requests)

    def identity(self) -> dict[str, object]:
        """Path, sizes, and a digest over every file's name, size and time."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(f"{request.name} {request.key} {request.problem}\n".encode())
        return {
            "path": str(self.root),
            "requests": len(self.requests),
            "bytes": self.bytes,
            "listing_sha256": digest.hexdigest(),
        }


def _look(root: Path, name: str, number: int) -> Request:
    try:
        with _folder(root, name) as folder:
            files, problem = _files(folder)
    except OSError as error:
        return Request(name, number, (None,) * len(FILES), f"{name}: {_reason(error)}")
    return Request(name, number, files, problem)


def _files(folder: int) -> tuple[tuple[tuple[int, int] | None, ...], str]:
    found: list[tuple[int, int] | None] = []
    problem = ""
    for file in FILES:
        try:
            facts = os.stat(file, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            found.append(None)
            continue
        if not stat.S_ISREG(facts.st_mode):
            kind = "a link" if stat.S_ISLNK(facts.st_mode) else "no plain file"
            problem = problem or f"{file} is {kind}"
        found.append((facts.st_size, facts.st_mtime_ns))
    return tuple(found), problem


@contextmanager
def _folder(root: Path, name: str) -> Iterator[int]:
    folder = os.open(root / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def opened(root: Path, request: Request, files: Iterable[str]) -> Iterator[Mapping[str, int]]:
    """Descriptors of some files of a request, never through a link. OSError as the system says.

    Their times of access stay as they are where the system allows that (the owner, or root).
    """
    descriptors: dict[str, int] = {}
    with _folder(root, request.name) as folder:
        try:
            for file in files:
                descriptors[file] = _open(folder, file)
            yield descriptors
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)


def _open(folder: int, file: str) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block
    try:
        return os.open(file, flags | os.O_NOATIME, dir_fd=folder)
    except PermissionError:
        return os.open(file, flags, dir_fd=folder)


def same(descriptor: int, file: tuple[int, int] | None) -> bool:
    """Whether an open file still has the size and time that were listed."""
    facts = os.fstat(descriptor)
    return file == (facts.st_size, facts.st_mtime_ns)


def _reason(error: OSError) -> str:
    # O_NOFOLLOW with O_DIRECTORY says ENOTDIR of a link.
    return "is a link or no folder" if isinstance(error, NotADirectoryError) else str(error)
