"""Deleting what this project owns, and nothing else.

A directory is owned when it carries the marker file that `claim` writes. `wipe` is the only place
in the project that deletes a tree.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.slate.errors import SlateError, WipeRefused
from pipeline.slate.files import fsync_directory, partial_of, read_json, write_json

MARKER = ".cleanslate.json"
MANIFEST = "manifest.json"
_PROJECT = "cleanslate"


def claim(directory: Path, *, stage: str, intent: dict[str, Any]) -> None:
    """Creates an output directory, or takes an empty one, and writes the marker into it.

    intent: what the stage is about to make it from, so that a later resume can compare.
    WipeRefused when the directory holds anything.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if found := sorted(path.name for path in _entries(directory)):
        raise WipeRefused(
            f"{directory} holds {len(found)} entries ({found[0]})",
            wanted="an empty directory",
            next_step="move them elsewhere, or set another run.root",
        )
    write_json(directory / MARKER, marker_value(stage, intent))


def marker_value(stage: str, intent: dict[str, Any]) -> dict[str, Any]:
    """What the marker of an output says."""
    return {"project": _PROJECT, "stage": stage, "intent": intent}


def _entries(directory: Path) -> list[Path]:
    """What is in a directory, but for a marker that a killed `claim` left half written."""
    half = partial_of(directory / MARKER)
    return [path for path in directory.iterdir() if path != half or path.is_symlink()]


def read_marker(directory: Path) -> dict[str, Any] | None:
    """The marker's content, or None where this project does not own the directory.

    WipeRefused when there is a marker that cannot be read.
    """
    path = directory / MARKER
    if not path.is_file() or path.is_symlink():
        return None
    try:
        value = read_json(path)
    except SlateError as error:
        raise WipeRefused(
            error.found,
            wanted="the marker of an output, whole: without it nothing here is deleted",
            next_step=f"look into {directory}; if it is an output of this project, remove it: "
            f"rm -r {directory}",
        ) from error
    if not isinstance(value, dict) or value.get("project") != _PROJECT:
        return None
    return value


def check_wipeable(directory: Path, *, root: Path) -> None:
    """Says whether `wipe` would be allowed, touching nothing. WipeRefused when it would not.

    Refused: an empty path, `/`, a home, a mount point or one below, a symlink (also on the way from
    the root), a directory that holds something and no marker, one that is not below root.
    """
    if str(directory) in ("", ".") or not directory.is_absolute():
        raise _refused(directory, "not an absolute path")
    if ".." in directory.parts:
        raise _refused(directory, "a path with ..")
    if not root.is_absolute() or root not in directory.parents:
        raise _refused(directory, f"not below the run root {root}")
    if directory == Path("/") or directory == Path.home() or directory in Path.home().parents:
        raise _refused(directory, "the root or a home")
    for part in (directory, *(path for path in directory.parents if path.is_relative_to(root))):
        if part.is_symlink():
            raise _refused(part, "a symlink")
    if not directory.exists():
        return
    if not directory.is_dir():
        raise _refused(directory, "not a directory")
    if _entries(directory) and read_marker(directory) is None:
        raise _refused(directory, f"a directory without this project's marker ({MARKER})")
    device = directory.parent.stat().st_dev
    for path, folders, _ in os.walk(directory):
        for name in (".", *folders):
            here = Path(path) / name
            if here.is_mount() or (not here.is_symlink() and here.stat().st_dev != device):
                raise _refused(here, "a mount point")


def wipe(directory: Path, *, root: Path) -> None:
    """Empties an owned directory: the manifest first, the rest, the marker last; then looks.

    Until the manifest is gone the old output is whole; from then on nothing is sealed. The empty
    directory stays. WipeRefused as `check_wipeable` says, and when something is left at the end.
    """
    check_wipeable(directory, root=root)
    if not directory.exists():
        return
    (directory / MANIFEST).unlink(missing_ok=True)
    fsync_directory(directory)
    for path in sorted(directory.iterdir()):
        if path.name == MARKER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # noqa: TID251  the one owner of deletion
        else:
            path.unlink()
    (directory / MARKER).unlink(missing_ok=True)
    fsync_directory(directory)
    if left := sorted(path.name for path in directory.iterdir()):
        raise WipeRefused(
            f"{directory} still holds {len(left)} entries after the wipe ({left[0]})",
            wanted="an empty directory",
            next_step="see which process writes there: lsof +D " + str(directory),
        )


def drop_partials(directory: Path) -> None:
    """Removes what a killed process left half written in an owned directory: hidden names.

    All but the marker; libraries have hidden names of their own for what they are writing.
    """
    if read_marker(directory) is None:
        raise _refused(directory, f"a directory without this project's marker ({MARKER})")
    for path in sorted(directory.rglob(".*")):
        if path == directory / MARKER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # noqa: TID251  the one owner of deletion
        else:
            path.unlink(missing_ok=True)


def owned_directories(root: Path) -> list[Path]:
    """Directories below root that carry the marker, outermost only, sorted."""
    found: list[Path] = []
    for path, folders, files in os.walk(root):
        if MARKER in files and read_marker(Path(path)) is not None:
            found.append(Path(path))
            folders.clear()
    return sorted(found)


def _refused(path: Path, what: str) -> WipeRefused:
    return WipeRefused(
        f"{path or '(empty path)'} is {what}",
        wanted="a directory of this project below the run root",
        next_step="set run.root to a directory of its own, or move what is there elsewhere",
    )
