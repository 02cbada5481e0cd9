"""Small files that ask for gigabytes, for ever, or for a file elsewhere: each refused in words."""

import gzip
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from pipeline.slate.files import sha256_json
from tests.hostile.bounded import Bounded
from tests.hostile.good import IMAGES

DEEP = b"[" * 100_000 + b"]" * 100_000
LAUGHS = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))]
)
MEBIBYTE = 1 << 20

# reader, what is written over its file
BYTES: dict[str, tuple[str, bytes]] = {
    "a deep JSON file": ("json", DEEP),
    "a number of a million digits": ("json", b"1" * 10**6),
    "a number beyond floats": ("json", b'{"rows": 1e999}'),
    "half of a surrogate pair": ("json", b'{"a": "\\ud800"}'),
    "a deep index": ("shard_index", DEEP),
    "a deep manifest": ("manifest", DEEP),
    "a deep state of a checkpoint": ("checkpoint", DEEP),
    "a deep record of images": ("images", DEEP),
    "a deep config": ("target", DEEP),
    "a deep config of a drafter": ("drafter", DEEP),
    "a deep profile": ("profile", b"[" * 100_000),
    "a profile that repeats itself 2^40 times": ("profile", LAUGHS.encode()),
    "a profile that holds itself": ("profile", b"run: &a {b: *a}"),
    "an integer that is none": ("profile", b"train: {epochs: !!int x}"),
    "an override that repeats itself": ("override", b"train=[&a [1, *a]]"),
    "a tag that would make an object": ("profile", b"run: !!python/object/apply:os.getcwd []"),
    "a host that repeats itself 2^40 times": (
        "ready_host", f"{LAUGHS}\nready_host: {{gpus: *a11}}".encode()
    ),
    "a vocabulary with a header of 2^60 bytes": ("vocabulary", struct.pack("<Q", 2**60) + b"{}"),
    "GGUF with 10^18 keys": ("gguf", struct.pack("<4sIQQ", b"GGUF", 3, 0, 10**18)),
    "GGUF with 10^18 tensors": ("gguf", struct.pack("<4sIQQ", b"GGUF", 3, 10**18, 0)),
    "GGUF with a key of 2^60 bytes": (
        "gguf", struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**60) + b"a"
    ),
    "GGUF with a list of 10^18 bytes": (
        "gguf",
        struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 0, 10**18),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BYTES)
def test_it_is_refused(what: str, good: dict[str, Path], bounded: Bounded) -> None:
    reader, data = BYTES[what]
    good[reader].write_bytes(data)
    outcome = bounded.read(reader, good[reader])
    assert outcome["kind"] == "fault", outcome.get("trace", outcome)


def in_json(reader: str, file: str, *place: object, value: object) -> Callable[..., str]:
    """Puts one value into a JSON file beside the reader's own."""

    def change(good: dict[str, Path]) -> str:
        path = good[reader].with_name(file) if file else good[reader]
        whole = json.loads(path.read_bytes())
        *parents, last = place
        here = whole
        for key in parents:
            here = here[key]
        here[last] = value
        path.write_text(json.dumps(whole))
        return reader

    return change


INDEX = "samples-00000.json"
CHANGES: dict[str, Callable[[dict[str, Path]], str]] = {
    "10^18 rows": in_json("prepared", INDEX, "rows", value=10**18),
    "a sample of 10^18 rows": in_json("prepared", INDEX, "entries", 0, "length", value=10**18),
    "an id that is a list": in_json("prepared", INDEX, "entries", 0, "id", value=["s-0"]),
    "a million taps": in_json("states", "dataset.json", "taps", value=list(range(10**6))),
    "10^18 layers": in_json("target_model", "", "num_hidden_layers", value=10**18),
    "10^18 channels": in_json("target_model", "", "hidden_size", value=10**18),
    "no heads": in_json("target", "", "num_attention_heads", value=0),
    "a drafter of 10^18 channels": in_json(
        "drafter", "", "cleanslate", "drafter", "intermediate_size", value=10**18
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_value_that_cannot_be_is_refused(
    what: str, good: dict[str, Path], bounded: Bounded
) -> None:
    reader = CHANGES[what](good)
    outcome = bounded.read(reader, good[reader])
    assert outcome["kind"] == "fault", outcome.get("trace", outcome)


@pytest.mark.parametrize("name", ["../outside", "..", "a\0b"])
def test_an_index_that_names_another_shard_throughout_is_refused(
    name: str, good: dict[str, Path], bounded: Bounded
) -> None:
    index = good["shard_index"]
    said = json.dumps(name)[1:-1]
    index.write_text(index.read_text().replace("samples-00000.safetensors", said))
    good["prepared"].rename(index.parent.parent / "outside")
    outcome = bounded.read("prepared", good["prepared"])
    assert (outcome["kind"], outcome.get("type")) == ("fault", "ShardDamaged"), outcome
    assert "not the one beside it" in outcome["parts"][0]


def test_an_index_that_names_weights_elsewhere_is_refused(
    good: dict[str, Path], bounded: Bounded
) -> None:
    folder = good["target"].parent
    weights = folder / "model.safetensors"
    weights.rename(folder.parent / "outside.safetensors")
    names = {"lm_head.weight": "../outside.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    outcome = bounded.read("target", good["target"])
    assert outcome["kind"] == "fault", outcome
    assert "../outside.safetensors" in outcome["parts"][0]


def test_a_manifest_that_lists_a_file_elsewhere_is_refused(
    good: dict[str, Path], bounded: Bounded
) -> None:
    body = json.loads(good["manifest"].read_bytes())
    body["files"]["../../etc/passwd"] = body["files"].pop("data.bin")
    del body["self_sha256"]
    good["manifest"].write_text(json.dumps({**body, "self_sha256": sha256_json(body)}))
    outcome = bounded.read("manifest", good["manifest"])
    assert (outcome["kind"], outcome.get("type")) == ("fault", "Damaged"), outcome


@pytest.mark.parametrize("reader", ["json", "target", "images", "checkpoint", "profile", "drafter"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(
    reader: str, good: dict[str, Path], bounded: Bounded
) -> None:
    good[reader].unlink()
    os.mkfifo(good[reader])
    assert bounded.read(reader, good[reader])["kind"] == "fault"


@pytest.mark.parametrize("reader", ["json", "target", "drafter"])
@pytest.mark.parametrize("size", [300 * MEBIBYTE, 1 << 40])
def test_a_file_that_is_mostly_a_hole_is_not_read_whole(
    reader: str, size: int, good: dict[str, Path], bounded: Bounded
) -> None:
    os.truncate(good[reader], size)
    outcome = bounded.read(reader, good[reader])
    assert outcome["kind"] == "fault", outcome
    assert f"{size} bytes, at most" in outcome["parts"][0]


def test_a_device_in_place_of_a_file_is_not_read(good: dict[str, Path], bounded: Bounded) -> None:
    good["images"].unlink()
    good["images"].symlink_to("/dev/zero")
    assert bounded.read("images", good["images"])["kind"] == "fault"


def packed(*pieces: tuple[bytes, int]) -> bytes:
    """gzip of each piece so many times, made without holding it."""
    pack = zlib.compressobj(9, zlib.DEFLATED, 31)
    return (
        b"".join(
            pack.compress(piece * min(times, 4096))
            for piece, count in pieces
            for times in [4096] * (count // 4096) + [count % 4096]
        )
        + pack.flush()
    )


# Contents of a .gz, and whether the rest of the file is lost with it.
PACKED = {
    "a line of 200 MiB": ("talks.jsonl.gz", packed((b"a" * 1024, 200 * 1024)), "read"),
    "20 million empty lists in a line": (
        "talks.jsonl.gz", packed((b'{"messages":[', 1), (b"[],", 20_000_000)), "read"),
    "20 million empty lists in a record": (
        "talks.json.gz", packed((b'[{"messages":[', 1), (b"[],", 20_000_000)), "fault"),
    "20 million empty lists in one record": (
        "talks.json.gz", packed((b'{"messages":[\n', 1), (b"[],", 20_000_000)), "read"),
    "brackets without an end": ("talks.json.gz", packed((b"[", 10_000_000)), "fault"),
    "a string without an end": ("talks.json.gz", packed((b'["', 1), (b"a", 2**27)), "fault"),
    "a cut stream": ("talks.jsonl.gz", gzip.compress(b'{"messages": []}\n' * 9999)[:-9], "fault"),
}  # fmt: skip


@pytest.mark.parametrize("what", PACKED)
def test_little_gzip_does_not_become_much_memory(
    what: str, tmp_path: Path, bounded: Bounded
) -> None:
    name, data, kind = PACKED[what]
    assert len(data) < 2 * MEBIBYTE
    (tmp_path / name).write_bytes(data)
    outcome = bounded.read("conversations", tmp_path / name, seconds=60.0)
    assert outcome["kind"] == kind, outcome


def test_a_table_of_texts_that_are_no_utf8_is_refused(tmp_path: Path, bounded: Bounded) -> None:
    raw = arrow.array([b"\xff\xfe", b"hello"]).cast(arrow.binary())
    text = arrow.Array.from_buffers(arrow.string(), 2, raw.buffers())
    empty = arrow.array([[], []], arrow.list_(arrow.string()))
    table = arrow.table({"messages": empty, "id": text})
    parquet.write_table(table, tmp_path / "talks.parquet")
    outcome = bounded.read("conversations", tmp_path / "talks.parquet")
    assert (outcome["kind"], outcome.get("type")) == ("fault", "SourceError"), outcome


def test_a_spoilt_table_is_read_or_refused_in_words(tmp_path: Path, bounded: Bounded) -> None:
    turn = {"role": "user", "content": "hi"}
    path = tmp_path / "talks.parquet"
    parquet.write_table(arrow.table({"messages": [[turn, turn]] * 50, "id": ["a"] * 50}), path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):
        for byte in (b"\0", b"\xff", b"\x80"):
            path.write_bytes(whole[:at] + byte + whole[at + 1 :])
            outcome = bounded.read("conversations", path)
            assert outcome["kind"] in ("read", "fault"), (at, byte, outcome)


def test_a_whole_record_of_images_is_read(good: dict[str, Path], bounded: Bounded) -> None:
    """The wall itself lets whole files pass."""
    good["images"].write_text(json.dumps(IMAGES))
    assert bounded.read("images", good["images"])["kind"] == "read"
