"""Records out of real files of every kind, whole and broken."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.errors import SourceError
from pipeline.conversations.read import Record, Unreadable, read_records

RECORDS = [{"messages": [{"role": "user", "content": f"Grüße {i} \u2028 ✓"}]} for i in range(3)]


def written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def values(path: Path, **options: Any) -> list[Any]:
    return [
        record.value if isinstance(record, Record) else record
        for record in read_records(path, **options)
    ]


LINES = "\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS).encode()
ARRAY = json.dumps(RECORDS, ensure_ascii=False, indent=1).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES),
        ("a.ndjson", LINES + b"\n"),
        ("A.JSONL", LINES.replace(b"\n", b"\r\n") + b"\r\n"),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES),
        ("a.jsonl", LINES.replace(b"\n", b"\n\n  \n")),
        ("a.jsonl.gz", LINES),
        ("a.json.gz", ARRAY),
        ("a.json", ARRAY),
        ("a.json", b"\xef\xbb\xbf \n" + ARRAY + b"\n "),
        ("a.json", LINES),
    ],
)
def test_every_kind_of_file_gives_the_same_records(tmp_path, name, data):
    assert values(written(tmp_path, name, data)) == RECORDS


def test_a_gzip_file_without_the_suffix_is_read_by_its_content(tmp_path):
    assert values(written(tmp_path, "a.jsonl", gzip.compress(LINES))) == RECORDS


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_may_hold_one_record(tmp_path, indent):
    data = json.dumps(RECORDS[0], indent=indent).encode()
    assert values(written(tmp_path, "a.json", data)) == RECORDS[:1]


def test_an_empty_array_holds_no_records(tmp_path):
    assert values(written(tmp_path, "a.json", b" [ ] ")) == []


def test_lines_and_records_are_named_by_where_they_stand(tmp_path):
    lines = read_records(written(tmp_path, "a.jsonl", b"\n{}\n\n{}\n"))
    assert [record.place for record in lines] == ["a.jsonl line 2", "a.jsonl line 4"]
    elements = read_records(written(tmp_path, "a.json", b"[{},\n\n{}]"))
    assert [record.place for record in elements] == ["a.json record 1", "a.json record 2"]


BAD = [
    (b'{"a": 1', "not JSON"),
    (b"hello", "not JSON"),
    (b'{"a": 1} {"a": 2}', "not JSON"),
    (b'{"a": NaN}', "NaN"),
    (b'{"a": -Infinity}', "-Infinity"),
    (b'{"a": 1, "a": 2}', "'a' is there twice"),
    (b'{"a": "\xff"}', "not UTF-8"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not readable JSON"),
    (b"[" * 100_000, "not readable JSON"),
    (b"[" * 200 + b"]" * 200, "nested"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_bad_line_is_named_and_no_good_one_behind_it_is_lost(tmp_path, name, line, reason):
    first, bad, last = values(written(tmp_path, name, b'{"x": 1}\n' + line + b'\n{"x": 2}\n'))
    assert (first, last) == ({"x": 1}, {"x": 2})
    assert isinstance(bad, Unreadable)
    assert bad.place == f"{name} line 2"
    assert reason in bad.reason


def test_a_json_file_of_lines_with_a_bad_first_line_is_read_as_lines(tmp_path):
    bad, *good = values(written(tmp_path, "a.json", b'{"x": \n' + LINES))
    assert bad.place == "a.json line 1"
    assert good == RECORDS


@pytest.mark.parametrize(
    ("element", "reason"),
    [(b'{"a": NaN}', "NaN"), (b'{"a": 1, "a": 2}', "twice"), (b'{"a": "\xc3"}', "not UTF-8")],
)
def test_a_bad_element_of_an_array_is_named_and_the_rest_is_read(tmp_path, element, reason):
    path = written(tmp_path, "a.json", b"[1, " + element + b', {"a": "\xc3\xbc"}]')
    first, bad, last = values(path)
    assert (first, last) == (1, {"a": "ü"})
    assert bad.place == "a.json record 2"
    assert reason in bad.reason


def test_a_line_beyond_the_limit_is_refused_and_the_next_one_read(tmp_path):
    path = written(tmp_path, "a.jsonl", b'"' + b"x" * 5_000_000 + b'"\n{"x": 2}\n')
    bad, good = values(path, max_record_bytes=1000)
    assert "longer than 1000 bytes" in bad.reason
    assert good == {"x": 2}


def test_a_line_of_exactly_the_limit_is_read(tmp_path):
    path = written(tmp_path, "a.jsonl", b'"' + b"x" * 98 + b'"\n"' + b"y" * 98 + b'"')
    assert values(path, max_record_bytes=100) == ["x" * 98, "y" * 98]


def test_an_array_longer_than_the_window_is_read_whole(tmp_path):
    elements = ["x" * n for n in (0, 700_000, 3, 2_500_000, 1)] + [12345678901234567890] * 9
    elements += [{"ü" * 400_000: ['é\\"\n'] * 9}] * 3
    path = written(tmp_path, "a.json", json.dumps(elements, ensure_ascii=False).encode())
    assert values(path) == elements


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"[1, 2", "ends within record 2"),
        (b"[1, 2,", "ends within record 3"),
        (b'[{"a": "b', "ends within record 1"),
        (b"[1 2]", "where ']' was due"),
        (b"[1, 2] 3", "behind its array"),
        (b"[{'a': 1}, {}, {}, {}, {}, {}]", "record 1 is not JSON"),
    ],
)
def test_an_array_whose_rest_is_lost_is_a_fault(tmp_path, data, found):
    with pytest.raises(SourceError, match=found):
        values(written(tmp_path, "a.json", data))


def test_an_element_beyond_the_limit_is_a_fault(tmp_path):
    path = written(tmp_path, "a.json", b'["' + b"x" * 9_000_000 + b'", 1]')
    with pytest.raises(SourceError, match="record 1 has no end"):
        values(path, max_record_bytes=1000)


@pytest.mark.parametrize("kept", [11, 60, -9, -1])
def test_a_cut_gzip_file_is_a_fault(tmp_path, kept):
    path = written(tmp_path, "a.jsonl.gz", LINES * 50)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SourceError, match="cut or damaged gzip"):
        values(path)


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("a.txt", LINES, "no known kind"),
        ("a.parquet.gz", LINES, "no known kind"),
        ("a.jsonl", b"", "is empty"),
        ("a.parquet", b"", "is empty"),
        ("a.parquet", LINES, "cut or damaged Parquet"),
        ("a.jsonl", LINES.decode().encode("utf-16"), "UTF-16"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_a_fault(tmp_path, name, data, found):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(SourceError, match=found):
        values(path)


def test_a_gz_that_is_no_gzip_is_a_fault(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(LINES)
    with pytest.raises(SourceError, match="not gzip"):
        values(path)


def test_a_missing_file_and_a_folder_are_faults_at_once(tmp_path):
    with pytest.raises(SourceError, match="No such file"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(SourceError, match="not a file"):
        read_records(tmp_path / "d.jsonl")


def test_strict_reading_stops_at_the_first_bad_line_and_names_it(tmp_path):
    records = read_records(written(tmp_path, "a.jsonl", b"{}\n{\n{}\n"), strict=True)
    assert isinstance(next(records), Record)
    with pytest.raises(SourceError, match=r"a\.jsonl line 2"):
        next(records)


def parquet_file(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path = folder / "a.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path, **options)
    return path


def test_parquet_rows_are_as_if_read_alone(tmp_path):
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    rows = [
        {"messages": [{"role": "user", "content": "Hi", "name": None, "tool_calls": None}]},
        {"messages": [{"role": "assistant", "content": None, "name": "b", "tool_calls": [call]}]},
    ]
    assert values(parquet_file(tmp_path, rows)) == [
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "assistant", "name": "b", "tool_calls": [call]}]},
    ]


def test_parquet_rows_come_in_order_over_several_row_groups(tmp_path):
    rows = [{"messages": [{"role": "user", "content": str(i)}], "pixels": b"x"} for i in range(700)]
    records = list(read_records(parquet_file(tmp_path, rows, row_group_size=100)))
    assert [record.value for record in records] == [{"messages": row["messages"]} for row in rows]
    assert records[-1].place == "a.parquet row 700"


def test_parquet_without_conversations_shows_the_columns_that_it_has(tmp_path):
    assert values(parquet_file(tmp_path, [{"text": "Hi"}])) == [{"text": "Hi"}]


@pytest.mark.parametrize("kept", [100, -8, -1])
def test_a_cut_parquet_file_is_a_fault(tmp_path, kept):
    path = parquet_file(tmp_path, [{"messages": []}] * 50)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SourceError, match="cut or damaged Parquet"):
        values(path)


GOOD_LINE = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2).map(
    lambda value: json.dumps(value, ensure_ascii=False).encode()
)
BAD_LINE = st.binary(max_size=12).map(lambda data: b"x" + data.translate(None, b"\r\n"))


@given(
    lines=st.lists(GOOD_LINE | BAD_LINE, min_size=1), end=st.sampled_from([b"\n", b"\r\n", b"\r"])
)
def test_every_line_is_read_or_reported(tmp_path_factory, lines, end):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(end.join(lines) + end)
    read = list(read_records(path))
    assert [record.line for record in read] == list(range(1, len(lines) + 1))
    for line, record in zip(lines, read, strict=True):
        assert isinstance(record, Unreadable) == line.startswith(b"x")
