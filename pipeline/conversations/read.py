"""Records out of a conversations file, one after the other, in bounded memory.

Kinds, by the file's name (each also behind .gz, except Parquet):

    .jsonl .ndjson    one record a line; lines end with LF or CRLF, nothing else (U+2028 inside
                      a string is text); blank lines are no records
    .json             by content: an array of records, one record, or JSON lines
    .parquet          one record a row; a null field is taken as absent, because a table gives every
                      row the fields of all others

What cannot be read as one record, but whose end is known, is an Unreadable with its place and the
reason: not JSON, NaN, a key that is there twice, invalid UTF-8, longer than max_record_bytes.
Where the rest of a file is lost (cut gzip, cut array, broken Parquet), reading ends with a
SourceError: what came before is not the whole, and no count would say so.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as arrow
import pyarrow.parquet as parquet

from pipeline.conversations.errors import SourceError, lost
from pipeline.conversations.json_text import CHUNK_BYTES, Complaints, Window, not_utf8, too_deep
from pipeline.conversations.normalise import COLUMNS, RECORD_KEYS

MAX_RECORD_BYTES = 256 * 2**20
KINDS = (".json", ".jsonl", ".ndjson", ".parquet", ".json.gz", ".jsonl.gz", ".ndjson.gz")
_ROWS_PER_BATCH = 256
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


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
    kind = _kind(path)
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


def _kind(path: Path) -> str:
    """The file's kind by its name, `.gz` left off, after it was seen to be a file with content."""
    name = path.name.lower()
    kind = next((kind for kind in KINDS if name.endswith(kind)), None)
    if kind is None:
        raise SourceError(
            f"{path} is of no known kind",
            wanted=f"a name that ends with one of {', '.join(KINDS)}",
            next_step="rename or convert the file",
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
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if path.name.lower().endswith(".gz") and not packed:
            lost(path, "is not gzip, whatever its name says", None)
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
        try:
            _skip_mark(path, stream)
            yield stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            lost(path, f"is cut or damaged gzip ({error})", error)
        except OSError as error:
            lost(path, f"cannot be read ({error})", error)


def _skip_mark(path: Path, stream: BinaryIO) -> None:
    start = stream.read(3)
    if start[:2] in _WIDE_MARKS:
        lost(path, "is UTF-16, wanted UTF-8", None)
    if start != codecs.BOM_UTF8:
        stream.seek(0)


def _json(path: Path, kind: str, *, limit: int) -> Iterator[Record | Unreadable]:
    with _opened(path) as stream:
        start = stream.tell()
        layout = "lines" if kind != ".json" else _layout(stream, limit=limit)
        stream.seek(start)
        if layout == "array":
            yield from _array(path, stream, limit=limit)
        elif layout == "one":
            yield _parse(stream.read(), source=path.name, line=1, unit="record")
        else:
            yield from _lines(path.name, stream, limit=limit)


def _layout(stream: BinaryIO, *, limit: int) -> str:
    """What a .json file holds: array, one (record), or lines. Reads at most limit bytes."""
    head = b""
    while not head.strip() and (more := stream.read(CHUNK_BYTES)):
        head = more
    if head.lstrip().startswith(b"["):
        return "array"
    head += stream.read(limit - len(head) + 1)
    if len(head) > limit:  # one record would be too long, lines may not be
        return "lines"
    first, _, rest = head.strip().partition(b"\n")
    if not rest or _is_json(first):
        return "lines"
    return "one" if _is_json(head) else "lines"


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(source: str, stream: BinaryIO, *, limit: int) -> Iterator[Record | Unreadable]:
    number = 0
    # readline with a limit: a line of 2 GB must not be held whole to be refused.
    while data := stream.readline(limit + 1):
        number += 1
        if len(data) > limit and not data.endswith(b"\n"):
            while (more := stream.readline(CHUNK_BYTES)) and not more.endswith(b"\n"):
                pass
            yield Unreadable(source, number, f"longer than {limit} bytes")
        elif data.strip():
            yield _parse(data, source=source, line=number)


def _parse(data: bytes, *, source: str, line: int, unit: str = "line") -> Record | Unreadable:
    complaints = Complaints()
    try:
        value = complaints.decoder.decode(data.decode())
    except UnicodeDecodeError as error:
        return Unreadable(source, line, f"not UTF-8 at byte {error.start}", unit)
    except json.JSONDecodeError as error:
        return Unreadable(source, line, f"not JSON: {error.msg} at character {error.pos}", unit)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits; nesting too deep
        return Unreadable(source, line, f"not readable JSON: {error}", unit)
    noted = complaints.noted or too_deep(value, opening=data.count(b"[") + data.count(b"{"))
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


def _parquet(path: Path) -> Iterator[Record]:
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            # Wide tables carry images and scores: those columns are not even read.
            known = [name for name in names if name in RECORD_KEYS]
            columns = known if set(known) & set(COLUMNS) else None
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns):
                for value in batch.to_pylist(maps_as_pydicts="strict"):
                    row += 1
                    yield Record(path.name, row, _present(value), "row")
    except (arrow.ArrowException, OSError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        lost(path, f"is cut or damaged Parquet after row {row} ({first})", error)


def _present(value: Any) -> Any:
    """A table's value without the fields that are null."""
    if isinstance(value, dict):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_present(inner) for inner in value]
    return value
