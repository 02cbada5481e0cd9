"""JSON from a file or a wire that may hold anything: a value, or one kind of error."""

import errno
import json
import math
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_NESTING = 100
_MOST_BYTES = 256 << 20  # a shard's index has some 300 a sample


def read_plain(path: Path, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """All bytes of a plain file. OSError when it is none (a pipe would be waited for) or larger."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    if found.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"{found.st_size} bytes, at most {most_bytes}", str(path))
    return path.read_bytes()


def parse_json(text: bytes | str, *, infinite: bool = False) -> Any:
    """A JSON value. ValueError for everything else, and for what later code could not work with.

    Refused: bytes that are no UTF-8, half of a surrogate pair, more than 100 levels, and, unless
    `infinite`, NaN and numbers that are too large for a float.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        if infinite:
            value = json.loads(text)
        else:
            value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_NESTING} levels") from None
    if text.count("[") + text.count("{") > MAX_NESTING and _depth(value) > MAX_NESTING:
        raise ValueError(f"nested deeper than {MAX_NESTING} levels")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError: half of a pair
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _depth(value: Any) -> int:
    """Levels of lists and objects; stops counting behind the limit."""
    level, depth = [value], 0
    while depth <= MAX_NESTING and (level := [one for outer in level for one in _inside(outer)]):
        depth += 1
    return depth


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
