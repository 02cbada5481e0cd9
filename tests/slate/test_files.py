import errno
import io
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.faults import Fault
from pipeline.slate.errors import SlateError
from pipeline.slate.files import (
    canonical_json,
    disk_fault,
    named,
    read_json,
    read_through,
    sha256_json,
    write_atomic,
)
from pipeline.slate.manifest import differences
from pipeline.slate.progress import Progress, duration, progress_line


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, b"old")
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from pathlib import Path
from pipeline.slate.files import write_atomic
write_atomic(Path({str(path)!r}), b"n" * 5000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "make room there"),
        (errno.EDQUOT, "make room there"),
        (errno.EIO, "repair it"),
        (errno.EROFS, "repair it"),
        (errno.EACCES, "right to it"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENAMETOOLONG, "shorter path"),
    ],
)
def test_an_error_without_a_name_gets_one_and_a_next_step(
    tmp_path: Path, number: int, words: str
) -> None:
    with pytest.raises(OSError, match="x") as caught, named(tmp_path / "shard"):
        raise OSError(number, "x")
    fault = disk_fault(caught.value, place=tmp_path, next_step="make extract RESUME=1")
    assert fault is not None
    assert fault.found.startswith(f"{tmp_path}/shard: x (")
    assert "MiB free" in fault.found
    assert words in fault.next_step
    assert fault.next_step.endswith("make extract RESUME=1")


def test_an_error_that_is_no_disks_stays_what_it_is(tmp_path: Path) -> None:
    error = FileNotFoundError(errno.ENOENT, "no such file", str(tmp_path / "x"))
    assert disk_fault(error, place=tmp_path, next_step="none") is None


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[" * 100_000])
def test_a_broken_json_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SlateError, match=r"x\.json"):
        read_json(path)


def test_json_has_one_spelling_and_no_nan() -> None:
    assert canonical_json({"b": 1, "a": "é"}) == '{"a":"é","b":1}'.encode()
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_differences_name_the_leaf_and_both_values() -> None:
    found = differences({"a": {"b": 1, "c": [1]}}, {"a": {"b": 2, "c": [1]}, "d": 3})
    assert found == ["a.b: found 2, wanted 1", "d: found 3, wanted null"]


def test_a_line_of_progress_has_rate_and_time_left() -> None:
    line = progress_line("extract", done=500, total=2000, unit="rows", new=400, seconds=4.0)
    assert line == "extract: 500/2,000 rows (25 %) | 100 rows/s | 15 s left | 4 s"


def test_an_unknown_total_is_not_shown_as_nought() -> None:
    line = progress_line("prepare", done=38, total=0, unit="records", new=38, seconds=2.0)
    assert line == "prepare: 38 records | 19.0 records/s | 2 s"


def test_progress_in_a_log_ends_with_one_whole_line() -> None:
    out = io.StringIO()
    with Progress("train", total=3, unit="steps", stream=out) as progress:
        for _ in range(3):
            progress.advance()
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().startswith("train: 3/3 steps (100 %)")


@pytest.mark.parametrize(
    ("seconds", "text"), [(8, "8 s"), (200, "3 min 20 s"), (3720, "1 h 02 min")]
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_fault_survives_a_process_border() -> None:
    rebuild, arguments = SlateError("a", wanted="b", next_step="c").__reduce__()  # type: ignore[misc]
    again = rebuild(*arguments)  # type: ignore[operator]
    assert isinstance(again, Fault)
    assert type(again) is SlateError
    assert str(again) == "a; wanted b; next: c"


def test_bytes_that_cannot_be_read_are_noticed_before_they_are_mapped(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.write_bytes(bytes(20_000_000))
    read_through(whole)
    read_through(whole, start=8 << 20, end=20_000_000)
    with pytest.raises(OSError, match=r"it ends 1 bytes early.*whole"):
        read_through(whole, start=5, end=20_000_001)
    # No page of a process lies at address 0: the kernel answers as a disk with a bad block does.
    with pytest.raises(OSError, match=r"Input/output error.*/proc/self/mem"):
        read_through(Path("/proc/self/mem"), end=4096)
