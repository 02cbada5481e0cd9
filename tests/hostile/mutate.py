"""How a whole file is spoilt: by bytes, by what its JSON says, by its safetensors header."""

import copy
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

DEEP = "@deep@"  # written as 3,000 brackets, which json.dumps could not write
WILD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 10**18, 2**63, 2**64, -(2**70), 10**400, 0.5, "@1e999@",
    "@NaN@", "@-Infinity@", "", ".", "..", "../../../etc/passwd", "/etc/passwd", "/dev/zero",
    "a\0b", "a\nb",
    "\ud800", "x" * 5000, [], {}, [[]], [None], {"a": None}, [1, "a"], DEEP, "true", "1",
    [[0, 1, 2]],
]  # fmt: skip
_WORDS = [
    "",
    "\u00b2",
    "9" * 5000,
    "9" * 400,
    "-1",
    "0",
    "|",
    "\\x",
    ":",
    "N/A",
    "[",
    "x" * 5000,
    "\n",
]
_MAGIC = [
    b"", b"\0", b"\xff" * 8, b"\0" * 8, (2**60).to_bytes(8, "little"),
    (10**9).to_bytes(8, "little"),
    b"[" * 2000, b"{{", b"\xed\xa0\x80", b"\n", b"\"", b"1e999", b"-1", b"NaN",
]  # fmt: skip


@st.composite
def spoilt_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """One to three of: bytes put in, taken out or put in place of others; a cut end."""
    data = whole
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 4, 8, 100, len(data)]))
        piece = draw(st.one_of(st.sampled_from(_MAGIC), st.binary(max_size=12)))
        data = data[:at] + piece + data[at + length :]
    return data


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in inside:
            found += _places(inner, (*at, key))
    return found


@st.composite
def spoilt_value(draw: st.DrawFn, whole: Any) -> Any:
    """A JSON value with one or two of its places replaced, removed or added to."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 2))):
        *parents, last = draw(st.sampled_from(_places(value)[1:] or [("x",)]))
        here = value
        for key in parents:
            here = here[key]
        wild = copy.deepcopy(draw(st.sampled_from(WILD)))
        how = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if how == "replace" and isinstance(here, dict | list):
            here[last] = wild
        elif how == "remove" and isinstance(here, dict | list) and here:
            del here[last]
        elif isinstance(here, dict):
            here["added"] = wild
        elif isinstance(here, list):
            here.append(wild)
    return value


def written(value: Any) -> bytes:
    """JSON text; the marked values as JSON's own writer would not write them."""
    text = json.dumps(value).replace(json.dumps(DEEP), "[" * 3000 + "]" * 3000)
    for name in ("1e999", "NaN", "-Infinity"):
        text = text.replace(f'"@{name}@"', name)
    return text.encode()


def canonical_sha256(value: Any) -> str:
    """The digest that a forger would put: of what the reader will have parsed, where it has one."""
    try:
        again = json.loads(written(value))
        text = json.dumps(again, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()
    except (ValueError, RecursionError):
        return "0" * 64


@st.composite
def spoilt_text(draw: st.DrawFn, whole: bytes) -> bytes:
    """Text with one or two of its words replaced, some with the rest of their line gone."""
    parts = re.split(r"(\w+)", whole.decode())
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(parts) - 1))
        parts[at] = draw(st.sampled_from(_WORDS))
        if draw(st.booleans()):
            end = next((n for n in range(at + 1, len(parts)) if "\n" in parts[n]), len(parts))
            parts[at + 1 : end] = []
    return "".join(parts).encode()


@st.composite
def spoilt_pickle(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file by torch.save whose pickle is spoilt, and its archive whole."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = next(name for name in parts if name.endswith("/data.pkl"))
    parts[name] = draw(spoilt_bytes(parts[name]))
    return zipped(parts)


def zipped(parts: Mapping[str, bytes]) -> bytes:
    """An archive as torch.save makes it: nothing in it is compressed."""
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in parts.items():
                archive.writestr(name, data)
        return file.getvalue()


@st.composite
def spoilt_safetensors(draw: st.DrawFn, whole: bytes) -> bytes:
    """A safetensors file with a spoilt header of the right length."""
    length = int.from_bytes(whole[:8], "little")
    header = draw(spoilt_value(json.loads(whole[8 : 8 + length])))
    text = written(header)
    return len(text).to_bytes(8, "little") + text + whole[8 + length :]
