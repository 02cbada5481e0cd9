"""Small files that ask for gigabytes, for ever, or for a file elsewhere: each refused in words."""

import gzip
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from pipeline.adoption.torch_file import Unfit, locate
from pipeline.conversations import read
from pipeline.conversations.errors import SourceError
from pipeline.slate.files import sha256_json
from tests.hostile.bounded import Bounded
from tests.hostile.good import IMAGES, STEP
from tests.hostile.mutate import zipped

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
    "a deep line of metrics": ("metrics", DEEP),
    "a loss that is no number": ("metrics", json.dumps({**STEP, "loss": "x"}).encode()),
    "a loss beyond floats": ("metrics", json.dumps({**STEP, "loss": 10**400}).encode()),
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


def test_a_text_that_is_that_of_every_row_is_not_repeated_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "ROOM_BYTES", 64 * MEBIBYTE)
    path = tmp_path / "talks.parquet"
    text = arrow.DictionaryArray.from_arrays(arrow.array([0] * 256), ["a" * MEBIBYTE])
    parquet.write_table(arrow.table({"prompt": text, "id": text}), path, compression="zstd")
    assert path.stat().st_size < MEBIBYTE
    with pytest.raises(SourceError, match="takes more than 64 MiB for 256 rows"):
        list(read.read_records(path))


TUPLES = b"\x80\x02}K\x01" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"K\x01s."
PICKLES = {
    "gigabytes of zeros": b"\x80\x02c__builtin__\nbytearray\n(J\xff\xff\xff\x7ftR.",
    "tuples of tuples as a key": TUPLES,
}


@pytest.mark.parametrize("what", PICKLES)
def test_a_pickle_of_more_than_a_tensor_is_refused(
    what: str, good: dict[str, Path], bounded: Bounded
) -> None:
    parts = {"a/data.pkl": PICKLES[what], "a/data/0": b"x", "a/version": b"3\n"}
    good["dump"].write_bytes(zipped(parts))
    assert bounded.read("dump", good["dump"])["kind"] == "read"
    assert unfit(good["dump"]) == "unsafe_pickle"


def unfit(path: Path) -> str:
    with path.open("rb") as file, pytest.raises(Unfit) as caught:
        locate(file.fileno(), file=path.name)
    return caught.value.reason


def test_an_archive_that_is_mostly_a_hole_is_not_read_whole(
    good: dict[str, Path], bounded: Bounded
) -> None:
    """Its end says that there are 3 GiB of entries."""
    path, size = good["dump"], 3 << 30
    with path.open("r+b") as file:
        file.truncate(size + 100)
        file.seek(size + 100)
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, size, 100, 0))
    assert bounded.read("dump", path) == {"kind": "read"}
    assert unfit(path) == "unreadable"


# Where in an entry of the archive's list, and what is written there.
ENTRIES = {
    "locked": ("a/byteorder", 8, b"\1"),
    "packed in a way that nothing reads": ("a/byteorder", 10, b"\x63"),
    "packed, and no such stream": ("a/byteorder", 10, b"\x0e"),
    "of gigabytes": ("a/byteorder", 20, b"\0\0\0\x7f\0\0\0\x7f"),
    "behind byte 2^63": ("a/data/0", 42, b"\xff" * 4),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_an_archive_with_an_impossible_entry_is_unreadable(
    what: str, good: dict[str, Path], bounded: Bounded
) -> None:
    name, at, put = ENTRIES[what]
    far = zipfile.ZipInfo("a/data/0")
    far.extra = struct.pack("<HHQ", 1, 8, 2**63 + 5)  # counts where the field itself is full
    with zipfile.ZipFile(good["dump"], "w") as archive:
        for entry in ("a/data.pkl", "a/byteorder", far):
            archive.writestr(entry, b"little")
    data = bytearray(good["dump"].read_bytes())
    place = data.rfind(b"PK\1\2", 0, data.rfind(name.encode())) + at
    data[place : place + len(put)] = put
    good["dump"].write_bytes(data)
    assert bounded.read("dump", good["dump"]) == {"kind": "read"}
    assert unfit(good["dump"]) == "unreadable"


LONG = "9" * 5000  # more digits than a number may have
# reader, file, a word of it, and what stands there instead
WORDS = {
    "a process without a number": ("host", "nvidia-smi", "11", "N/A"),
    "a link of too many lanes": ("host", "lspci", "x16", f"x{LONG}"),
    "a driver of too high a version": ("host", "proc-driver-nvidia-version", "580", LONG),
    "an Xid of too many digits": ("host", "journalctl", "79", LONG),
    "a mount point with half an escape": ("host", "proc-self-mounts", "\\040", "\\x"),
    "a decision about another sample": ("journal", "journal.jsonl", '"sample": 1', '"sample": 7'),
}


@pytest.mark.parametrize("what", WORDS)
def test_a_spoilt_word_is_told_or_not_believed(
    what: str, good: dict[str, Path], bounded: Bounded
) -> None:
    reader, name, word, instead = WORDS[what]
    path = good[reader].with_name(name)
    text = path.read_text()
    assert word in text
    path.write_text(text.replace(word, instead))
    assert bounded.read(reader, good[reader]) == {"kind": "read"}


def test_a_whole_record_of_images_is_read(good: dict[str, Path], bounded: Bounded) -> None:
    """The wall itself lets whole files pass."""
    good["images"].write_text(json.dumps(IMAGES))
    assert bounded.read("images", good["images"])["kind"] == "read"
