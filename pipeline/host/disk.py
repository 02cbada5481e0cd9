"""Room on disks and tmpfs."""

import os
from pathlib import Path

from pipeline.host.tmpfs import unescaped


def existing_parent(path: Path) -> Path:
    """The nearest directory on the way up that exists."""
    while not path.exists():
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user may still write where `path` is or will be."""
    stat = os.statvfs(existing_parent(path))
    return stat.f_bavail * stat.f_frsize


def filesystem(path: Path) -> str:
    """Type of the file system where `path` is or will be (`ext4`, `tmpfs`), from /proc/mounts."""
    wanted = existing_parent(path).resolve()
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, fstype, *_ = [*line.split(" "), "", ""]
        point = Path(unescaped(mount))
        if wanted.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, fstype
    return kind
