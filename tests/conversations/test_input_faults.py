"""Files that are not what they should be, through the public `prepare`."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.field_reports.talks_fixtures import (  # noqa: F401
    Talks,
    plain_target_fixture,
    talk,
    talks_fixture,
)

RECORDS = [talk(f"How many is {n}?", f"It is {n}.") for n in range(6)]
LINES = [json.dumps(record).encode() for record in RECORDS]
ANSWERS = [[f"It is {n}.<|im_end|>"] for n in range(6)]


def put(talks: Talks, name: str, data: bytes) -> Path:
    path = talks.root / name
    path.write_bytes(data)
    return path


def answers(talks: Talks, path: Path, *more: str) -> list[list[str]]:
    done = talks.prepare(path, *more)
    assert done.status == 0, done.out + done.err
    return [supervised for supervised, _ in talks.islands()]


BOM = b"\xef\xbb\xbf"
SAME = {
    "mixed.jsonl": LINES[0] + b"\r\n" + LINES[1] + b"\n" + LINES[2] + b"\r" + b"\n".join(LINES[3:]),
    "old-mac.jsonl": b"\r".join(LINES),
    "bom.jsonl": BOM + b"\n".join(LINES),
    "two-with-bom.jsonl": BOM + b"\n".join(LINES[:3]) + b"\n" + BOM + b"\n".join(LINES[3:]),
    "array.jsonl": b"[" + b",".join(LINES) + b"]",
    "pretty-array.jsonl": json.dumps(RECORDS, indent=2).encode(),
    "array-a-line.jsonl": b"[\n" + b",\n".join(LINES) + b"\n]\n",
    "array.jsonl.gz": gzip.compress(b"[" + b",".join(LINES) + b"]"),
    "lines.json": b"\n".join(LINES),
    "array.json": BOM + b" [" + b",".join(LINES) + b"]\n",
    "UPPER.JSONL": b"\n".join(LINES),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_records_are_read_from_every_make_of_file(talks: Talks, name):
    assert answers(talks, put(talks, name, SAME[name])) == ANSWERS
    assert talks.counts()["read"] == 6


def test_a_folder_of_files_is_read_by_name_and_hidden_files_are_none(talks: Talks):
    folder = talks.root / "folder"
    folder.mkdir()
    (folder / "b.jsonl").write_bytes(b"\n".join(LINES[4:]))
    (folder / "A.JSONL").write_bytes(b"\n".join(LINES[:2]))
    (folder / "a.json.gz").write_bytes(gzip.compress(b"[" + b",".join(LINES[2:4]) + b"]"))
    (folder / ".DS_Store").write_bytes(b"\0")
    assert answers(talks, folder) == ANSWERS


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: path.write_text("a,b"), "holds 1 conversation files, and besides: x.csv"),
        (lambda path: path.mkdir(), "and besides: x.csv"),
        (lambda path: path.with_name("y.jsonl").mkdir(), "y.jsonl is not a file"),
        (lambda path: os.mkfifo(path.with_name("y.jsonl")), "y.jsonl is not a file"),
        (lambda path: path.with_name("y.jsonl").touch(), "y.jsonl is empty"),
        (lambda path: path.with_name("y.jsonl").symlink_to("gone"), "y.jsonl cannot be opened"),
        (lambda path: path.with_name("good.jsonl").unlink(), "holds 0 conversation files"),
    ],
)
def test_a_folder_with_anything_else_is_refused_and_the_file_named(talks: Talks, make, found):
    folder = talks.root / "folder"
    folder.mkdir()
    (folder / "good.jsonl").write_bytes(b"\n".join(LINES))
    make(folder / "x.csv")
    assert found in talks.refused(folder)


def cut_parquet(kept: int | None) -> bytes:
    sink = arrow.BufferOutputStream()
    parquet.write_table(arrow.Table.from_pylist(RECORDS * 100), sink, row_group_size=50)
    data = bytes(sink.getvalue())
    if kept is None:  # whole at both ends, zeros in between
        return data[:400] + bytes(2000) + data[2400:]
    return data[:kept]


PACKED = gzip.compress(b"\n".join(LINES * 300))
LOST = {
    "cut.parquet": (cut_parquet(-9), "is cut or damaged Parquet"),
    "half.parquet": (cut_parquet(3000), "is cut or damaged Parquet"),
    "holes.parquet": (cut_parquet(None), "is cut or damaged Parquet"),
    "csv.parquet": (b"role,content\nuser,hi\n", "is cut or damaged Parquet"),
    "cut.jsonl.gz": (PACKED[:-20], "is cut or damaged gzip"),
    "damaged.jsonl.gz": (PACKED[:-300] + bytes(50) + PACKED[-250:], "is cut or damaged gzip"),
    "plain.jsonl.gz": (b"\n".join(LINES), "is not gzip, whatever its name says"),
    "cut.json": (b"[" + b",".join(LINES)[:-5], "ends within record 6"),
    "cut-array.jsonl": (b"[" + b",".join(LINES) + b",", "ends within record 7"),
    "two-arrays.json": (b"[" + LINES[0] + b"][" + LINES[1] + b"]", "goes on behind its array"),
    "wide.jsonl": (b"\n".join(LINES).decode().encode("utf-16"), "is UTF-16 (or UTF-32)"),
    "wide-no-mark.jsonl": (b"\n".join(LINES).decode().encode("utf-16-be"), "is UTF-16"),
    "wider.jsonl": (b"\n".join(LINES).decode().encode("utf-32"), "is UTF-16 (or UTF-32)"),
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b" \n\r\n\t", "0 of 0 records kept, no supervised token is left"),
    "mark.jsonl": (BOM, "0 of 0 records kept"),
    "nothing.json": (b"[ ]", "0 of 0 records kept"),
    "nothing.jsonl.gz": (gzip.compress(b""), "0 of 0 records kept"),
    "zeros.jsonl": (bytes(5000), "zeros.jsonl line 1: unreadable: not JSON"),
    "talks.csv": (b"role,content\nuser,hi\n", "talks.csv is of no known kind"),
    "csv.jsonl": (b"role,content\nuser,hi\n", "csv.jsonl line 1: unreadable: not JSON"),
    "none": (b"\n".join(LINES), "none is of no known kind"),
}


@pytest.fixture(scope="module")
def sealed(plain_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Talks:
    """A sealed output of six samples, which no test may lose."""
    talks = Talks(tmp_path_factory.mktemp("sealed"), plain_target)
    answers(talks, put(talks, "good.jsonl", b"\n".join(LINES)))
    return talks


@pytest.mark.parametrize("name", LOST)
def test_a_file_of_which_the_whole_cannot_be_had_costs_no_sealed_output(sealed: Talks, name):
    before = (sealed.output / "manifest.json").read_bytes()
    data, found = LOST[name]
    assert found in sealed.refused(put(sealed, name, data))
    assert (sealed.output / "manifest.json").read_bytes() == before
    assert len(sealed.samples()) == 6


BAD_TEXT = [
    talk("half \ud83d of a pair", "Yes."),
    talk("A?", "half \udc00"),
    {"\ud83d": 1},
    {"messages": [{"role": "\udead", "content": "x"}]},
]


@pytest.mark.parametrize("who", ["file", "target"])
def test_halves_of_surrogate_pairs_are_counted_and_listed_by_line(talks: Talks, who):
    source = talks.write([*BAD_TEXT, *RECORDS])
    more = ("--set", f"prepare.answers={who}", "--set", "prepare.answering.max_new_tokens=2")
    done = talks.prepare(source, *more)
    assert done.status == 0, done.err
    counts, bad = talks.counts(), 2 if who == "file" else 1
    # What the second says is of no account where the target answers anew.
    assert counts["skipped"]["bad_text"] >= bad
    assert talks.skips()[0]["place"] == "talks.jsonl line 1"
    assert "\ud83d" in next(one["detail"] for one in talks.skips() if "fields" in one["detail"])


def test_nul_characters_in_a_text_are_kept_and_supervised_as_they_are(talks: Talks):
    talks.kept([talk("a\0b", "c\0d"), talk("A?", "Yes.")])
    assert talks.islands()[0][0] == ["c\0d<|im_end|>"]


def test_nul_bytes_between_records_are_one_bad_line_each(talks: Talks):
    path = put(talks, "holes.jsonl", b"\n".join([*LINES[:3], bytes(4096), *LINES[3:]]))
    assert answers(talks, path) == ANSWERS
    [skip] = talks.skips()
    assert (skip["place"], skip["reason"]) == ("holes.jsonl line 4", "unreadable")


def test_an_id_that_two_talks_share_is_of_no_account_and_the_same_talk_twice_is(talks: Talks):
    records: list[Any] = [{**record, "id": "same"} for record in RECORDS]
    counts = talks.kept([*records, {**records[0], "id": "other"}])
    assert (counts["kept"], counts["skipped"]) == (6, {"duplicate": 1})
    assert talks.skips()[0]["place"] == "talks.jsonl line 7"


def test_a_name_that_is_no_utf_8_is_refused_before_anything_is_wiped(talks: Talks):
    folder = talks.root / "folder"
    folder.mkdir()
    (folder / os.fsdecode(b"t\xff.jsonl")).write_bytes(b"\n".join(LINES))
    assert "a file whose name is no UTF-8" in talks.refused(folder)


def test_what_is_listed_of_a_bad_record_is_bounded(talks: Talks):
    talks.kept([*RECORDS, {"messages": [{"role": "x" * 10**6, "content": "Hi"}]}])
    assert (talks.output / "skipped.jsonl").stat().st_size < 1000


LIMIT = ("--set", "prepare.max_record_bytes=100000")


@pytest.mark.parametrize("name", ["long.jsonl", "long.json", "long.jsonl.gz"])
def test_a_line_over_the_limit_is_refused_by_its_number_and_the_others_are_read(talks: Talks, name):
    data = b"\n".join([*LINES[:2], b'"' + b"x" * 10**6 + b'"', *LINES[2:]])
    path = put(talks, name, gzip.compress(data) if name.endswith("gz") else data)
    assert answers(talks, path, *LIMIT) == ANSWERS
    [skip] = talks.skips()
    assert skip == {
        "place": f"{name} line 3",
        "reason": "unreadable",
        "detail": "longer than 100000 bytes",
    }


def test_an_element_over_the_limit_is_refused_by_its_number_before_anything_is_wiped(
    talks: Talks,
):
    data = b"[" + LINES[0] + b',"' + b"x" * 10**7 + b'"]'
    error = talks.refused(put(talks, "long.json", data), *LIMIT)
    assert "record 2 has no end in 100000 bytes" in error
