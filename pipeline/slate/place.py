"""Where a process of this project runs: on the host itself, or in a container of an image."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """What manifests and locks say of the place.

    image: name, id, base and inputs of the container's image; None on the host itself. commit: the
    one that the image was built from (no git in there). container: its name, for a process id of it
    means nothing outside.
    """

    image: Mapping[str, Any] | None = None
    commit: str | None = None
    container: str | None = None


HOST = Place()
