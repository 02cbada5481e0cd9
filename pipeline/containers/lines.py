"""The plan as lines of text, which `docker/run.sh` reads: a word, a blank, the rest of the line."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.containers.plan import Container, Mount


def lines_of(containers: Sequence[Container], *, folder: Path) -> Iterator[str]:
    """The run's folder, then for each container what it is, what it sees, and `start`.

    A mount is three lines: `mount ro|rw|alone` (to read, without what its links lead to), `source`,
    `target`. ContainerError was raised before for anything with a line break.
    """
    yield f"run {folder}"
    for container in containers:
        yield f"container {container.name}"
        yield f"stage {container.stage}"
        if container.gpus:
            yield f"gpus {','.join(map(str, container.gpus))}"
        for mount in container.mounts:
            yield from _mount_lines(mount)
        yield from (f"argument {argument}" for argument in container.arguments)
        yield f"image {container.image}"
        yield from (f"command {part}" for part in container.command)
        yield "start"


def _mount_lines(mount: Mount) -> Iterator[str]:
    yield f"mount {'rw' if mount.writable else 'ro' if mount.links else 'alone'}"
    yield f"source {mount.source}"
    yield f"target {mount.target}"
