"""The staging folder: files that pass from an engine to the shards, under a quota.

The engine's side reserves room before it writes and waits when there is none; the collector's side
waits for a file to be whole, reads it and frees it. Nothing is dropped and nothing grows.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.capture.errors import CaptureError

_POLL_SECONDS = 0.005


class StagingFailed(Exception):
    """The writer of a file gave up and said why: a stable reason and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Staging:
    """One folder, with a quota on the bytes that may wait in it."""

    def __init__(self, folder: Path, *, quota_bytes: int) -> None:
        self.folder, self.quota_bytes = folder, quota_bytes

    def waiting_bytes(self) -> int:
        """Bytes of the files that wait, partial ones included."""
        sizes: dict[int, int] = {}  # by inode: one that is renamed meanwhile may be met twice
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    if "safetensors" in entry.name:
                        sizes[entry.inode()] = entry.stat().st_size
                except FileNotFoundError:  # taken by the collector meanwhile
                    continue
        return sum(sizes.values())

    def write(self, name: str, tensors: Mapping[str, Tensor], *, timeout_seconds: float) -> None:
        """Waits for room, writes the file aside and renames it when it is whole.

        CaptureError when the file alone exceeds the quota, or no room appears in time.
        """
        needed = sum(tensor.nbytes for tensor in tensors.values())
        if needed > self.quota_bytes:
            raise CaptureError(
                f"{name} has {needed} bytes",
                wanted=f"at most the staging quota, {self.quota_bytes} bytes",
                next_step="raise extract.staging_quota_bytes",
            )
        deadline = time.monotonic() + timeout_seconds
        while self.waiting_bytes() + needed > self.quota_bytes:
            if time.monotonic() > deadline:
                raise CaptureError(
                    f"{self.folder}: no room for {needed} bytes in {timeout_seconds:.0f} s",
                    wanted="a collector that frees what it has read",
                    next_step="see whether the extract stage still runs",
                )
            time.sleep(_POLL_SECONDS)
        partial = self.folder / f".{name}.partial"
        save_file(dict(tensors), partial)
        partial.rename(self.folder / name)

    def wait(self, name: str, *, timeout_seconds: float) -> Path:
        """Waits until a file is whole, and gives its path.

        TimeoutError when it does not appear in time; StagingFailed when its writer gave up;
        ValueError for a name that leaves the folder.
        """
        if Path(name).name != name or name.startswith("."):
            raise ValueError(f"staging file name {name!r}")
        path, failed = self.folder / name, self._failed(name)
        deadline = time.monotonic() + timeout_seconds
        while not path.exists():
            if failed.exists():
                raise _failure(failed)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} did not appear in {timeout_seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        return path

    def read(self, name: str, *, timeout_seconds: float) -> dict[str, Tensor]:
        """Reads a file when it is whole, into memory.

        Errors of `wait`, and SafetensorError when the file is not what it says.
        """
        path = self.wait(name, timeout_seconds=timeout_seconds)
        if path.stat().st_size == 0:
            raise SafetensorError(f"{path} is empty")
        return load_file(path)

    def free(self, name: str) -> None:
        """Removes a file that was read or refused; its absence is no fault."""
        if Path(name).name == name:
            (self.folder / name).unlink(missing_ok=True)
            self._failed(name).unlink(missing_ok=True)

    def _failed(self, name: str) -> Path:
        return self.folder / f"{name.removesuffix('.safetensors')}.failed"


def _failure(marker: Path) -> StagingFailed:
    """The writer's own words, out of the marker that it left."""
    try:
        said = json.loads(marker.read_text(encoding="utf-8"))
        return StagingFailed(str(said["reason"]), str(said["detail"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return StagingFailed("io", f"{marker.name} cannot be read: {type(error).__name__}: {error}")
