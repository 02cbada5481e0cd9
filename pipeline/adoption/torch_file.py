"""A file by torch.save with one tensor in it: where the tensor lies, and its bytes.

torch.load is asked, with weights_only and a map, for the tensor's type and shape; no byte of the
tensor is touched for that, and a pickle that wants to run anything is refused by it. The bytes are
then read here and not through a map: under a map a cut file or a bad block ends the process. They
are compared with the CRC-32 that torch.save wrote, so a file that rotted on its disk is found.
"""

import io
import os
import pickletools
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name
_MOST_PICKLE_BYTES = 1 << 16
_MOST_LISTING_BYTES = 1 << 20  # of the archive's entries, of which there are some five
# What a pickle may name, and how often refer back to a value of its own. torch itself allows more:
# there a few bytes take gigabytes (bytearray), or for ever (tuples of tuples as a key).
_NAME = re.compile(
    r"torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)|collections OrderedDict"
)
_MOST_REFERENCES = 8
# What zipfile raises. RuntimeError: an entry is encrypted; OverflowError: it begins behind 2^63.
_BROKEN = (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, OverflowError)
_CHUNK_BYTES = 8 << 20
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Unfit(Exception):
    """A file or request is left out. reason: a stable code to count by; detail: for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Piece:
    """Where a tensor [rows, width] lies in its file.

    record, record_bytes, crc: the zip entry that holds its storage, its CRC-32; start: the tensor's
    first byte in the file.
    """

    rows: int
    width: int
    dtype: str
    start: int
    record: int
    record_bytes: int
    crc: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as it is stored."""
        return self.width * DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all rows as they are stored."""
        return self.rows * self.row_bytes


def locate(descriptor: int, *, file: str) -> Piece:
    """Finds the tensor of an open file.

    Errors: Unfit, of kinds old_format, unreadable, unsafe_pickle, not_a_tensor, shape, dtype.
    """
    try:
        start = os.pread(descriptor, len(_ZIP), 0)
        if start != _ZIP:
            if start[:1] == b"\x80":
                raise Unfit("old_format", f"{file} was saved in torch's format before 1.6")
            raise Unfit("unreadable", f"{file} does not begin as torch.save begins a file")
        record, record_start = _record(descriptor, file)
        tensor = _tensor(descriptor, file)
    except _BROKEN as error:
        raise Unfit("unreadable", f"{file}: {_short(error)}") from error
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        raise Unfit("not_a_tensor", f"{file} holds a {type(tensor).__name__}")
    if tensor.ndim != 2 or not tensor.numel() or not tensor.is_contiguous():
        found = f"{list(tensor.shape)}, strides {list(tensor.stride())}"
        raise Unfit("shape", f"{file} has shape {found}; wanted rows of one width, end to end")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise Unfit("dtype", f"{file} is {dtype}; wanted {', '.join(DTYPES)}")
    first = int(tensor.storage_offset()) * tensor.dtype.itemsize
    piece = Piece(
        rows=int(tensor.shape[0]),
        width=int(tensor.shape[1]),
        dtype=dtype,
        start=record_start + first,
        record=record_start,
        record_bytes=record.file_size,
        crc=record.CRC,
    )
    if first + piece.bytes > record.file_size:
        raise Unfit("unreadable", f"{file} holds {record.file_size} bytes, {piece.bytes} claimed")
    return piece


def _record(descriptor: int, file: str) -> tuple[zipfile.ZipInfo, int]:
    """The one storage in a file, and its first byte."""
    with _Short(os.dup(descriptor)) as stream, zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        pickles = [entry for entry in entries if entry.filename.lower().endswith("/data.pkl")]
        storages = [entry for entry in entries if "/data/" in entry.filename]
        if len(pickles) != 1 or pickles[0].file_size > _MOST_PICKLE_BYTES or len(storages) != 1:
            found = f"{len(pickles)} pickles and {len(storages)} storages"
            raise Unfit("not_a_tensor", f"{file} holds {found}; wanted one tensor alone")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise Unfit("unreadable", f"{file} is compressed")
        for entry in entries:
            if entry.filename.endswith("/byteorder") and archive.read(entry) != b"little":
                raise Unfit("dtype", f"{file} was written on a big-endian machine")
        _refuse_more(archive.read(pickles[0]), file)
        record = storages[0]
    header = os.pread(descriptor, _LOCAL_HEADER_BYTES, record.header_offset)
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != _ZIP:
        raise Unfit("unreadable", f"{file}: no entry at byte {record.header_offset}")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return record, record.header_offset + _LOCAL_HEADER_BYTES + names


class _Short(io.FileIO):
    """An archive may claim to list gigabytes of entries, which would be read to be refused."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MOST_LISTING_BYTES:
            raise zipfile.BadZipFile(f"{size} bytes of what should be short")
        return cast(bytes, super().read(size))


def _refuse_more(pickle: bytes, file: str) -> None:
    """Unfit when it names more than a tensor needs. It is taken apart for that, not run."""
    references = 0
    for code, value, _ in pickletools.genops(pickle):
        if code.name == "GLOBAL" and not _NAME.fullmatch(str(value)):
            raise Unfit(
                "unsafe_pickle", f"{file} names {str(value)[:100]!r}; nothing of it was run"
            )
        references += code.name == "DUP" or code.name.endswith("GET")
    if references > _MOST_REFERENCES:
        raise Unfit("unsafe_pickle", f"{file} repeats its own values; nothing of it was run")


def _tensor(descriptor: int, file: str) -> Any:
    # The same open file, whatever its name means by now.
    path = Path("/proc/self/fd") / str(descriptor)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251
    # It raises bare exceptions of many kinds for a file that it cannot read.
    except Exception as error:
        if "Weights only load failed" in str(error):
            raise Unfit(
                "unsafe_pickle", f"{file} holds more than a tensor; nothing of it was run"
            ) from error
        raise Unfit("unreadable", f"{file}: {_short(error)}") from error


def read_blocks(descriptor: int, piece: Piece, blocks: Sequence[tuple[int, int]]) -> Tensor:
    """Rows of (first, count) blocks, one after the other, as stored. Unfit, OSError."""
    rows = sum(count for _, count in blocks)
    tensor = torch.empty((rows, piece.width), dtype=DTYPES[piece.dtype])
    memory, done = _memory(tensor), 0
    for first, count in blocks:
        size = count * piece.row_bytes
        _fill(descriptor, memory[done : done + size], piece.start + first * piece.row_bytes)
        done += size
    return tensor


def read_whole(descriptor: int, piece: Piece) -> Tensor:
    """The tensor [rows, width] as stored, once its storage's CRC-32 is proven. Unfit, OSError."""
    tensor = torch.empty((piece.rows, piece.width), dtype=DTYPES[piece.dtype])
    memory = _memory(tensor)
    crc, at, end = 0, piece.record, piece.record + piece.record_bytes
    borders = (piece.start, piece.start + piece.bytes)
    spare = memoryview(bytearray(0))
    while at < end:
        # A storage may be larger than its tensor (a slice of a batch was saved).
        stop = min([border for border in (*borders, end) if border > at] + [at + _CHUNK_BYTES])
        if borders[0] <= at < borders[1]:
            chunk = memory[at - borders[0] : stop - borders[0]]
        else:
            if not spare:
                spare = memoryview(bytearray(_CHUNK_BYTES))
            chunk = spare[: stop - at]
        _fill(descriptor, chunk, at)
        crc = zlib.crc32(chunk, crc)
        at = stop
    # It is not needed again: the shards' own pages stay in memory for their digests.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if crc != piece.crc:
        raise Unfit("damaged", "its bytes do not have the CRC-32 that torch.save wrote")
    return tensor


def _memory(tensor: Tensor) -> memoryview:
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _fill(descriptor: int, into: memoryview, at: int) -> None:
    done = 0
    while done < len(into):
        got = os.preadv(descriptor, [into[done:]], at + done)
        if not got:
            raise Unfit("unreadable", f"the file ends at byte {at + done}")
        done += got


def _short(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else '(no message)'}"
