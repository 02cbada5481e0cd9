"""The staging folder: files that pass from an engine to the shards, under a quota.

The engine's side reserves room before it writes and waits when there is none; the collector's side
waits for a file to be whole, reads it and frees it. Nothing is dropped and nothing grows.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.capture.errors import StagingFull
from pipeline.host.disk import free_bytes
from pipeline.settings.strict_json import parse_json

_POLL_SECONDS = 0.005
_LENGTH_BYTES = 8  # a safetensors file opens with its header's length, little-endian
_HEADER_LIMIT_BYTES = 1 << 20  # far more than the few tensors of a sample take


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

        CaptureError when the file alone exceeds the quota, no room appears in time, or the file
        system takes less than the quota; then no part of the file is left.
        """
        needed = sum(tensor.nbytes for tensor in tensors.values())
        if needed > self.quota_bytes:
            raise StagingFull(
                f"{name} has {needed} bytes",
                wanted=f"at most the staging quota, {self.quota_bytes} bytes",
                next_step="raise extract.staging_quota_bytes",
            )
        deadline = time.monotonic() + timeout_seconds
        while self.waiting_bytes() + needed > self.quota_bytes:
            if time.monotonic() > deadline:
                raise StagingFull(
                    f"{self.folder}: no room for {needed} bytes in {timeout_seconds:.0f} s",
                    wanted="a collector that frees what it has read",
                    next_step="does the stage still run (its log)? then: make extract RESUME=1",
                )
            time.sleep(_POLL_SECONDS)
        partial = self.folder / f".{name}.partial"
        try:
            save_file(dict(tensors), partial)
            partial.rename(self.folder / name)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise StagingFull(
                f"{self.folder}: {needed} bytes of {name} cannot be written: {error} "
                f"({self.waiting_bytes()} bytes wait there, {free_bytes(self.folder)} are free)",
                wanted=f"room for extract.staging_quota_bytes, {self.quota_bytes} bytes",
                next_step="free the folder's file system (df -h), enlarge it or lower the quota, "
                "then: make extract RESUME=1",
            ) from error

    def wait(self, name: str, *, timeout_seconds: float) -> Path:
        """Waits until a file is whole, and gives its path.

        Whole is what has the bytes that its header speaks of, whoever wrote it and how: a file
        under its own name that still grows is waited for. TimeoutError when it is not whole in
        time; StagingFailed when its writer gave up; ValueError for a name that leaves the folder.
        """
        if Path(name).name != name or name.startswith("."):
            raise ValueError(f"staging file name {name!r}")
        path, failed = self.folder / name, self._failed(name)
        deadline = time.monotonic() + timeout_seconds
        while (short := _bytes_short(path)) != 0:
            if failed.exists():
                raise _failure(failed)
            if time.monotonic() > deadline:
                what = "appear" if short is None else f"become whole ({short} bytes are missing)"
                raise TimeoutError(f"{path} did not {what} in {timeout_seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        return path

    def read(self, name: str, *, timeout_seconds: float) -> dict[str, Tensor]:
        """Reads a file when it is whole, into memory.

        Errors of `wait`, and SafetensorError when the file is not what it says.
        """
        return load_file(self.wait(name, timeout_seconds=timeout_seconds))

    def free(self, name: str) -> None:
        """Removes a file that was read or refused; its absence is no fault."""
        if Path(name).name == name:
            (self.folder / name).unlink(missing_ok=True)
            self._failed(name).unlink(missing_ok=True)

    def _failed(self, name: str) -> Path:
        return self.folder / f"{name.removesuffix('.safetensors')}.failed"


def _bytes_short(path: Path) -> int | None:
    """Bytes that a growing safetensors file still lacks; None when it is not there.

    0 for a file that is no such thing too: reading it gives the error.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            end = _LENGTH_BYTES + length
            if size < _LENGTH_BYTES or size < end <= _HEADER_LIMIT_BYTES:
                return max(end, _LENGTH_BYTES + 1) - size
            if end > size:
                return 0
            header = parse_json(file.read(length))
            header.pop("__metadata__", None)
            data = max(int(entry["data_offsets"][1]) for entry in header.values())
            return max(0, end + data - size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0


def _failure(marker: Path) -> StagingFailed:
    """The writer's own words, out of the marker that it left."""
    try:
        said = parse_json(marker.read_bytes())
        return StagingFailed(str(said["reason"]), str(said["detail"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return StagingFailed("io", f"{marker.name} cannot be read: {type(error).__name__}: {error}")
