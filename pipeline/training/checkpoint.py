"""Checkpoints on disk: complete or invisible.

A checkpoint is a folder `step-00000123`: model.safetensors (float32 masters, d2t, t2d),
optimizer.safetensors and state.json, which is written last and holds sizes and digests of the
others. It is built as `.step-00000123.partial` and renamed when everything is synced. Folders whose
name starts with a dot are never read, and the next run removes them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.faults import Fault
from pipeline.host.disk import free_bytes
from pipeline.slate.files import (
    fsync_directory,
    fsync_file,
    read_json,
    sha256_file,
    sha256_json,
    write_json,
)
from pipeline.training.errors import CheckpointError, ResumeRefused

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
SUPERVISED_BY = "label: row t counts at TTT step k when token t + 2 + k is supervised"
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
_HIDDEN = re.compile(r"\.step-\d{8}\.(partial|pruned)")


@dataclass(frozen=True)
class Position:
    """How far a run is: optimizer steps done, epoch (from 0) of the last, steps done in it."""

    step: int
    epoch: int
    step_in_epoch: int


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: every file has the size and digest that state.json says.

    data, settings: what the run was made of, key by key, as JSON values. drafter: the drafter's
    config. outcome: numbers that the loop carries across a resumption.
    """

    folder: Path
    position: Position
    seed: int
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    drafter: Mapping[str, Any]
    outcome: Mapping[str, Any]

    def model(self) -> tuple[dict[str, Tensor], DraftVocabulary]:
        """float32 masters by the drafter's parameter names, and the draft vocabulary."""
        tensors = _tensors(self.folder, MODEL)
        vocabulary = DraftVocabulary.from_tensors(tensors, source=str(self.folder / MODEL))
        return {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}, vocabulary

    def optimizer(self) -> dict[str, Tensor]:
        """Moments and the number of updates, as `MasterAdamW.gather` names them."""
        return _tensors(self.folder, OPTIMIZER)

    def refuse_other(self, *, data: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """ResumeRefused, naming every value that differs, unless both are those of this run."""
        differences = [
            f"{key} was {_short(old.get(key))}, is {_short(new.get(key))}"
            for old, new in ((self.data, data), (self.settings, settings))
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
        if differences:
            raise ResumeRefused(
                f"{self.folder}: " + "; ".join(differences),
                wanted="the data and settings that wrote it",
                next_step="set them back, or start over without RESUME=1",
            )


def checkpoint_name(step: int) -> str:
    """Folder name of a step: `step-` and eight digits."""
    return f"step-{step:08d}"


def write_checkpoint(
    folder: Path,
    *,
    position: Position,
    seed: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    vocabulary: DraftVocabulary,
    data: Mapping[str, Any],
    settings: Mapping[str, Any],
    drafter: Mapping[str, Any],
    outcome: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint into `folder` (the run's checkpoints); gives its path.

    CheckpointError, with nothing visible and earlier checkpoints untouched, when the disk is full
    or the step has a complete checkpoint already. A broken one of the same step (an earlier run
    passed it over) makes room.
    """
    final = folder / checkpoint_name(position.step)
    partial = folder / f".{final.name}.partial"
    if final.exists() and _is_complete(final):
        raise CheckpointError(
            f"{final}: is there already",
            wanted="one checkpoint a step",
            next_step="start over in an empty output: make train",
        )
    contents = {MODEL: {**model, **vocabulary.tensors()}, OPTIMIZER: dict(optimizer)}
    try:
        _remove(partial)
        partial.mkdir(parents=True)
        files = {}
        for name, tensors in contents.items():
            path = partial / name
            save_file({key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, path)
            path.chmod(0o644)
            fsync_file(path)
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        write_json(
            partial / STATE,
            {
                "format": _FORMAT,
                "supervised_by": SUPERVISED_BY,
                "step": position.step,
                "epoch": position.epoch,
                "step_in_epoch": position.step_in_epoch,
                "seed": seed,
                "files": files,
                "data": dict(data),
                "data_digest": sha256_json(data),
                "settings": dict(settings),
                "settings_digest": sha256_json(settings),
                "drafter": dict(drafter),
                "outcome": dict(outcome),
            },
        )
        if final.exists() or final.is_symlink():
            _remove_visible(final)
        partial.rename(final)
        fsync_directory(folder)
    except (OSError, SafetensorError) as error:
        needed = sum(t.nbytes for tensors in contents.values() for t in tensors.values())
        # A full disk is freed again at once; what cannot be removed stays invisible by its name.
        _remove_quietly(partial)
        raise CheckpointError(
            f"{final}: cannot be written: {error}",
            wanted=f"room for {needed:,} bytes in {folder}, {_free(folder)}",
            next_step="make room or repair the disk (df, dmesg), then continue from the checkpoint "
            "before: make train RESUME=1",
        ) from error
    return final


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies one checkpoint. CheckpointError says what is broken."""
    try:
        state = read_json(folder / STATE)
        files = state["files"]
        if state["format"] != _FORMAT or state["supervised_by"] != SUPERVISED_BY:
            raise _broken(
                folder, f"format {state['format']}, supervised by {state['supervised_by']}"
            )
        if set(files) != {MODEL, OPTIMIZER}:
            raise _broken(folder, f"{STATE} lists {sorted(files)}")
        position = Position(int(state["step"]), int(state["epoch"]), int(state["step_in_epoch"]))
        if folder.name != checkpoint_name(position.step):
            raise _broken(folder, f"{STATE} is of step {position.step}")
        for part in ("data", "settings"):
            if sha256_json(state[part]) != state[f"{part}_digest"]:
                raise _broken(folder, f"{part} in {STATE} does not have its digest")
        for part in ("data", "settings", "drafter", "outcome"):
            if not isinstance(state[part], dict):
                raise _broken(folder, f"{part} in {STATE} is no object")
        for name, facts in files.items():
            size = (folder / name).stat().st_size
            if size != facts["bytes"]:
                raise _broken(folder, f"{name} has {size} bytes of {facts['bytes']}")
            if sha256_file(folder / name) != facts["sha256"]:
                raise _broken(folder, f"{name} does not have its sha256")
        return Checkpoint(
            folder,
            position,
            int(state["seed"]),
            state["data"],
            state["settings"],
            state["drafter"],
            state["outcome"],
        )
    except CheckpointError:
        raise
    except Fault as error:
        raise _broken(folder, error.found) from error
    except OSError as error:
        raise _broken(folder, f"{Path(error.filename or folder).name}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(folder, f"{STATE}: {type(error).__name__}: {error}") from error


def newest_complete(folder: Path) -> tuple[Checkpoint | None, list[tuple[str, str]]]:
    """The complete checkpoint of the highest step, and (name, why) of every newer one passed over.

    Completeness is read from the files, never believed from a name; hidden names do not count.
    """
    passed_over: list[tuple[str, str]] = []
    visible = [p for p in folder.iterdir() if not p.name.startswith(".")] if folder.is_dir() else []
    for path in sorted(visible, reverse=True):
        if not _NAME.fullmatch(path.name):
            passed_over.append((path.name, "its name is not one of a checkpoint"))
            continue
        try:
            return read_checkpoint(path), passed_over
        except CheckpointError as error:
            passed_over.append((path.name, error.found.removeprefix(f"{path}: ")))
    return None, passed_over


def prune(folder: Path, *, newest: int, keep: int) -> list[str]:
    """Keeps the checkpoint of step `newest`, just written, and keep - 1 before it; gives removals.

    Older ones that lack a file or have a wrong size do not count as kept, and later steps (broken
    ones that a resumption passed over) are left alone: neither can push a good one out.
    """
    older = sorted(
        path
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) < newest
    )
    whole = [path for path in older if _has_sizes(path)]
    doomed = whole[: len(whole) - (keep - 1)] if len(whole) > keep - 1 else []
    for path in doomed:
        _remove_visible(path)
    return [path.name for path in doomed]


def sweep(folder: Path) -> None:
    """Removes what a killed run left half written or half removed."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _HIDDEN.fullmatch(path.name):
                _remove(path)


def _is_complete(folder: Path) -> bool:
    try:
        read_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def _has_sizes(folder: Path) -> bool:
    """Whether all files are there in the sizes that state.json says; digests cost too much here."""
    try:
        files = read_json(folder / STATE)["files"]
        return all((folder / name).stat().st_size == files[name]["bytes"] for name in files)
    except (Fault, OSError, KeyError, TypeError):
        return False


def _remove_visible(path: Path) -> None:
    """Removes a checkpoint, out of sight first, so that a kill leaves no half of one visible."""
    hidden = path.with_name(f".{path.name}.pruned")
    _remove(hidden)
    path.rename(hidden)
    _remove(hidden)


def _remove(folder: Path) -> None:
    """Removes one of our hidden folders: plain files in it, then itself. OSError otherwise."""
    assert _HIDDEN.fullmatch(folder.name)
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def _remove_quietly(folder: Path) -> None:
    try:
        _remove(folder)
    except OSError:
        return


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(folder / name)
    except (OSError, SafetensorError, RuntimeError) as error:  # the last: torch cannot open it
        raise _broken(folder, f"{name}: {error}") from error


def _free(folder: Path) -> str:
    try:
        return f"where {free_bytes(folder):,} are free"
    except OSError as error:
        return f"which cannot be asked: {error.strerror}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _broken(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: {what}",
        wanted="a complete checkpoint",
        next_step="use an earlier checkpoint: make train RESUME=1 finds it",
    )
