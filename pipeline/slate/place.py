"""Where a process of this project runs: on the host itself, or in a container of an image."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    """What manifests and locks say of the place, and what the host of it must be.

    image: name, id, base and inputs of the container's image; None on the host itself. commit: the
    one that the image was built from (no git in there). container: its name, for a process id of it
    means nothing outside. wanted: file that says what a ready host is; None: hosts are not checked.
    shared_memory_bytes: what /dev/shm must have room for, where it is checked.
    """

    image: Mapping[str, Any] | None = None
    commit: str | None = None
    container: str | None = None
    wanted: Path | None = None
    shared_memory_bytes: int | None = None


HOST = Place()
