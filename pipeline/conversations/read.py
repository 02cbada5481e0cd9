"""Records out of a conversations file, one after the other, in bounded memory.

Kinds, by the file's name (each also behind .gz, except Parquet):

    .jsonl .ndjson    one record a line; lines end with LF, CRLF or CR, nothing else (U+2028 inside
                      a string is text); blank lines are no records; an array of objects in such
                      a file is read as the array that it is
    .json             by content: an array of records, one record, or JSON lines
    .parquet          one record a row; a null field is taken as absent, because a table gives every
                      row the fields of all others; times are taken as ISO 8601, decimals as text

What cannot be read as one record, but whose end is known, is an Unreadable with its place and the
reason: not JSON, NaN, a key that is there twice, invalid UTF-8, longer than max_record_bytes, bytes
in a table.
Where the rest of a file is lost (cut gzip, cut array, broken Parquet), reading ends with a
SourceError: what came before is not the whole, and no count would say so.
"""

import codecs
import datetime
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as arrow
import pyarrow.parquet as parquet

from pipeline.conversations.bounds import limited_memory
from pipeline.conversations.errors import SourceError, lost
from pipeline.conversations.json_text import (
    CHUNK_BYTES,
    Complaints,
    Window,
    not_utf8,
    too_deep,
    too_many,
)
from pipeline.conversations.normalise import COLUMNS, RECORD_KEYS
from pipeline.slate.files import named

MAX_RECORD_BYTES = 64 * 2**20
KINDS = (".json", ".jsonl", ".ndjson", ".parquet", ".json.gz", ".jsonl.gz", ".ndjson.gz")
_ROWS_PER_BATCH = 256
ROOM_BYTES = 4 << 30
"""Most memory that a batch of a table's rows may ask for."""
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_WIDE_STARTS = (b"{\0", b"[\0", b"\0{", b"\0[", b"\0\0\0{", b"\0\0\0[")
_HEAD_BYTES = 2**16  # of a file of lines, to see whether it is an array


@dataclass(frozen=True)
class Record:
    """One record as read. line: 1-based; a line number, or the record's number (see unit)."""

    source: str
    line: int
    value: Any
    unit: str = "line"

    @property
    def place(self) -> str:
        """Where it stands, for people: `talks.jsonl line 7`."""
        return f"{self.source} {self.unit} {self.line}"


@dataclass(frozen=True)
class Unreadable:
    """One record that could not be read, and why; its place as in Record."""

    source: str
    line: int
    reason: str
    unit: str = "line"

    @property
    def place(self) -> str:
        """Where it stands, for people: `talks.jsonl line 7`."""
        return f"{self.source} {self.unit} {self.line}"


def read_records(
    path: Path, *, strict: bool = False, max_record_bytes: int = MAX_RECORD_BYTES
) -> Iterator[Record | Unreadable]:
    """All records of a file in its order; memory is bounded by a few times max_record_bytes.

    strict: an unreadable record is a SourceError at once. Raises SourceError, before the first
    record, for a file that is missing, empty or of no known kind; later, where the rest is lost.
    """
    kind = kind_of(path)
    found = _parquet(path) if kind == ".parquet" else _json(path, kind, limit=max_record_bytes)
    if not strict:
        return found
    return _strictly(found)


def _strictly(records: Iterable[Record | Unreadable]) -> Iterator[Record | Unreadable]:
    for record in records:
        if isinstance(record, Unreadable):
            raise SourceError(
                f"{record.place}: {record.reason}",
                wanted="a readable record (reading is strict)",
                next_step="correct it, or let unreadable records be skipped and counted",
            )
        yield record


def kind_of(path: Path) -> str:
    """The file's kind by its name, `.gz` left off, after it was seen to be a file with content.

    SourceError for anything else.
    """
    name = path.name.lower()
    kind = next((kind for kind in KINDS if name.endswith(kind)), None)
    if kind is None:
        raise SourceError(
            f"{path} is of no known kind",
            wanted=f"a name that ends with one of {', '.join(KINDS)}",
            next_step="convert the file to JSON lines, or rename it if it is such a file",
        )
    try:
        empty = path.stat().st_size == 0
    except OSError as error:
        lost(path, f"cannot be opened ({error.strerror})", error)
    if not path.is_file():
        lost(path, "is not a file", None)
    if empty:
        lost(path, "is empty", None)
    return kind.removesuffix(".gz")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked if they are gzip (by content: names lie), a BOM left out."""
    with named(path), path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if path.name.lower().endswith(".gz") and not packed:
            lost(path, "is not gzip, whatever its name says", None)
        unpacked = cast(io.RawIOBase, gzip.GzipFile(fileobj=raw)) if packed else None
        stream = io.BufferedReader(unpacked, CHUNK_BYTES) if unpacked else raw
        try:
            _skip_mark(path, stream)
            yield stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            lost(path, f"is cut or damaged gzip ({error})", error)
        except OSError as error:
            lost(path, f"cannot be read ({error})", error)


def _skip_mark(path: Path, stream: BinaryIO) -> None:
    start = stream.read(4)
    if start.startswith(_WIDE_MARKS + _WIDE_STARTS):
        lost(
            path,
            "is UTF-16 (or UTF-32), wanted UTF-8",
            None,
            next_step="convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW",
        )
    stream.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)


def _json(path: Path, kind: str, *, limit: int) -> Iterator[Record | Unreadable]:
    with _opened(path) as stream:
        start = stream.tell()
        if kind == ".json":
            layout = _layout(stream, limit=limit)
        else:
            layout = "array" if _is_array(stream.read(_HEAD_BYTES)) else "lines"
        stream.seek(start)
        if layout == "array":
            yield from _array(path, stream, limit=limit)
        elif layout == "one":
            text = stream.read().decode(errors="surrogateescape")
            yield _parse(text, source=path.name, line=1, unit="record")
        else:
            yield from _lines(path.name, stream, limit=limit)


def _layout(stream: BinaryIO, *, limit: int) -> str:
    """What a .json file holds: array, one (record), or lines. Reads at most limit bytes."""
    head = b""
    while not head.strip() and (more := stream.read(CHUNK_BYTES)):
        head = more
    if head.lstrip().startswith(b"["):
        return "array"
    head += stream.read(max(0, limit + 1 - len(head)))
    if len(head) > limit:  # one record would be too long, lines may not be
        return "lines"
    first, _, rest = head.strip().partition(b"\n")
    if not rest or _is_json(first):
        return "lines"
    return "one" if _is_json(head) else "lines"


def _is_array(head: bytes) -> bool:
    """Whether a file that should hold lines is one array of objects.

    A line that is a list among others is a bad record and no more.
    """
    text = head.lstrip()
    if not (text.startswith(b"[") and text[1:].lstrip().startswith(b"{")):
        return False
    first, _, rest = text.partition(b"\n")
    return not (rest.strip() and _is_json(first))


def _is_json(data: bytes) -> bool:
    if too_many(data.decode(errors="replace")):
        return False
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(source: str, stream: BinaryIO, *, limit: int) -> Iterator[Record | Unreadable]:
    number = 0
    # Bytes that are no UTF-8 become lone surrogates: noticed with the line they are in.
    with io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape") as lines:
        # readline with a limit: a line of 2 GB must not be held whole to be refused.
        while text := lines.readline(limit + 1):
            number += 1
            whole = text.endswith("\n")
            if _bytes(text.rstrip("\n"), limit) > limit:
                del text
                while not whole and (more := lines.readline(CHUNK_BYTES)):
                    whole = more.endswith("\n")
                yield Unreadable(source, number, f"longer than {limit} bytes")
            elif text.strip(" \t\r\n"):
                yield _parse(text, source=source, line=number)


def _bytes(text: str, limit: int) -> int:
    """Bytes of a text in UTF-8, exact only where they may exceed the limit."""
    if text.isascii() or 4 * len(text) <= limit:
        return len(text)
    return len(text.encode(errors="surrogateescape"))


def _parse(text: str, *, source: str, line: int, unit: str = "line") -> Record | Unreadable:
    complaints = Complaints()
    if reason := too_many(text) or not_utf8(text):
        return Unreadable(source, line, reason, unit)
    try:
        # Files with a byte order mark that were laid end to end have it in between, too.
        value = complaints.decoder.decode(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        return Unreadable(source, line, f"not JSON: {error.msg} at character {error.pos}", unit)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits; nesting too deep
        return Unreadable(source, line, f"not readable JSON: {error}", unit)
    noted = complaints.noted or too_deep(value, opening=text.count("[") + text.count("{"))
    return Unreadable(source, line, noted, unit) if noted else Record(source, line, value, unit)


def _array(path: Path, stream: BinaryIO, *, limit: int) -> Iterator[Record | Unreadable]:
    """The elements of one JSON array, decoded as they come in; line counts the elements."""
    window = Window(path, stream, limit=limit)
    window.take("[")
    number = 0
    while window.peek() != "]" or number:
        number += 1
        value, text, noted = window.value(number)
        noted = noted or not_utf8(text)
        noted = noted or too_deep(value, opening=text.count("[") + text.count("{"))
        if noted:
            yield Unreadable(path.name, number, noted, "record")
        else:
            yield Record(path.name, number, value, "record")
        if window.peek() != ",":
            break
        window.take(",")
    window.take("]")
    if window.peek():
        lost(path, f"goes on behind its array of {number} records", None)


def _parquet(path: Path) -> Iterator[Record | Unreadable]:
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            # Wide tables carry images and scores: those columns are not even read.
            known = [name for name in names if name in RECORD_KEYS]
            columns = known if set(known) & set(COLUMNS) else None
            batches = file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns)
            while (values := _values(batches)) is not None:
                for value in values:
                    row += 1
                    yield _row(path.name, row, value)
    except MemoryError as error:
        lost(
            path,
            f"takes more than {ROOM_BYTES >> 20} MiB for {_ROWS_PER_BATCH} rows (after row {row})",
            error,
            next_step="look where it is from; if its texts are that long, convert it to JSON lines",
        )
    except (arrow.ArrowException, OSError, LookupError, ValueError, ArithmeticError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        lost(path, f"is cut or damaged Parquet after row {row} ({first})", error)


def _values(batches: Iterator[Any]) -> list[Any] | None:
    """The rows of the next batch, None behind the last.

    Some kilobytes of a table can unpack to gigabytes, and one long text can be that of every row.
    """
    with limited_memory(ROOM_BYTES):
        batch = next(batches, None)
        return None if batch is None else batch.to_pylist(maps_as_pydicts="strict")


def _row(source: str, row: int, value: Any) -> Record | Unreadable:
    try:
        return Record(source, row, _present(value), "row")
    except TypeError as error:
        return Unreadable(source, row, str(error), "row")


def _present(value: Any) -> Any:
    """A table's value as JSON would hold it, without the fields that are null; or TypeError."""
    if isinstance(value, dict):
        return {str(key): _present(inner) for key, inner in value.items() if not _absent(inner)}
    if isinstance(value, list):
        return [_present(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"holds a {type(value).__name__}, which JSON has not")


def _absent(value: Any) -> bool:
    """Null, or what tables of floats have in its place."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))
