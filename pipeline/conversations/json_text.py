"""JSON text piece by piece: a decoder that notes instead of raising, and a window on a stream.

The standard decoder works on whole strings; a JSON array of gigabytes is walked with it here, one
element at a time.
"""

import codecs
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.conversations.errors import lost

CHUNK_BYTES = 2**20
MAX_NESTING = 100
MAX_VALUES = 2_000_000  # of one record, about: an empty list takes 3 bytes of text and 64 of memory


class Complaints:
    """JSON hooks that note what is wrong instead of raising, so that the end is still found."""

    def __init__(self) -> None:
        self.noted: str | None = None
        self.decoder = json.JSONDecoder(
            object_pairs_hook=self._object,
            parse_constant=self._constant,
            parse_float=self._number,
        )

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            self.noted = self.noted or f"the key {twice!r} is there twice"
        return value

    def _number(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            self.noted = self.noted or f"{text:.20} is too large a number"
        return value

    def _constant(self, name: str) -> None:
        self.noted = self.noted or f"{name} is not JSON"


def not_utf8(text: str) -> str | None:
    """A complaint if bytes that were no UTF-8 went into this text (see Window)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8 at its character {error.start}"
    return None


def too_many(text: str) -> str | None:
    """A complaint about a text that could hold so many values that no memory could."""
    if any(text.count(mark) > MAX_VALUES for mark in ",[{"):
        return f"more than {MAX_VALUES} values"
    return None


def too_deep(value: Any, *, opening: int) -> str | None:
    """A complaint about a value so deeply nested that recursive code could not walk it.

    opening: brackets in its text, those within strings included; few of them spare the walk.
    """
    if opening <= MAX_NESTING:
        return None
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _inside(outer)]:
        depth += 1
        if depth > MAX_NESTING:
            return f"nested deeper than {MAX_NESTING} levels"
    return None


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class Window:
    """The part of a JSON text that is looked at, filled from a stream as far as needed."""

    def __init__(self, path: Path, stream: BinaryIO, *, limit: int) -> None:
        self._path = path
        self._stream = stream
        self._limit = limit
        self._text = ""
        self._at = 0
        # Bytes that are no UTF-8 become lone surrogates: noticed with the element they are in.
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")

    def _fill(self, size: int) -> bool:
        data = self._stream.read(size)
        self._text = self._text[self._at :] + self._bytes.decode(data, final=not data)
        self._at = 0
        return bool(data)

    def peek(self) -> str:
        """The next character that is no white space, or "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if not self._fill(CHUNK_BYTES):
                return ""

    def take(self, wanted: str) -> None:
        """Step over one character, which must be the wanted one."""
        found = self.peek()
        if found != wanted:
            lost(self._path, f"holds {found or 'its end'!r} where {wanted!r} was due", None)
        self._at += 1

    def value(self, number: int) -> tuple[Any, str, str | None]:
        """The next JSON value, its text, and what is wrong with it; SourceError without an end."""
        self.peek()
        size = CHUNK_BYTES
        while True:
            complaints = Complaints()
            if len(self._text) > 2 * CHUNK_BYTES and (reason := too_many(self._text[self._at :])):
                lost(self._path, f"record {number} has {reason}", None)
            try:
                value, end = complaints.decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Wrong, or only cut where the window ends? Far from its end it is wrong.
                inside = error.pos < len(self._text) - 16
                if inside and not error.msg.startswith("Unterminated string"):
                    lost(self._path, f"record {number} is not JSON: {error.msg}", error)
                failure: Exception = error
            except (ValueError, RecursionError) as error:  # a number of 5000 digits, too
                lost(self._path, f"record {number} is not readable JSON: {error}", error)
            else:
                if end < len(self._text):  # a number at the very end may go on
                    text = self._text[self._at : end]
                    self._at = end
                    return value, text, complaints.noted
                failure = EOFError("the file ends here")
            if len(self._text) > self._limit:
                lost(self._path, f"record {number} has no end in {self._limit} bytes", failure)
            if not self._fill(size):
                lost(self._path, f"ends within record {number}", failure)
            size *= 2  # what is decoded again and again stays a few times the whole
