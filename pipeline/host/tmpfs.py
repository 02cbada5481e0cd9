"""Tmpfs mounts: the live size, which is what counts, and whose they are."""

import re
from dataclasses import dataclass

from pipeline.host.reader import Entry, Missing, Reader, Room


@dataclass(frozen=True)
class TmpfsFacts:
    """kind: type of what is mounted exactly there, None where nothing is."""

    path: str
    kind: str | Missing | None
    room: Room | Missing
    entry: Entry | Missing


def read_tmpfs(reader: Reader, path: str) -> TmpfsFacts:
    """What is mounted at `path`; room and entry are of the folder in any case."""
    mounts = reader.text("/proc/self/mounts")
    kind = mounts if isinstance(mounts, Missing) else mounted_at(mounts, path)
    return TmpfsFacts(path, kind, reader.room(path), reader.entry(path))


def unescaped(field: str) -> str:
    """A mount point as it is: the kernel writes blanks, line ends and backslashes in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def mounted_at(mounts: str, path: str) -> str | None:
    """Type of the file system at a mount point; of stacked ones, the last: that one is seen."""
    kind = None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) > 2 and unescaped(fields[1]) == path:
            kind = fields[2]
    return kind
