"""The journal: what was decided is not read again, and several requests for one sample."""

import os
from pathlib import Path

import pytest

from pipeline.adoption.dump import Dump
from pipeline.adoption.survey import Journal, claims, survey
from pipeline.faults import Fault
from tests.adoption.conftest import Captured, write_request


def looked(captured: Captured, root: Path, journal: Path) -> dict[str, str]:
    requests = Dump.scan(root).requests
    found = survey(
        captured.judge_of(root),
        requests,
        Journal(journal, about={"dump": "d"}),
        threads=2,
        advance=lambda _: None,
    )
    return {name: verdict.outcome for name, verdict in found.items()}


def test_what_was_decided_is_not_read_again(captured: Captured, tmp_path: Path) -> None:
    root, journal = tmp_path / "dump", tmp_path / "journal.jsonl"
    for number in (0, 1, 2):
        write_request(root, number, captured.states[number])
    assert looked(captured, root, journal) == dict.fromkeys(("req_0", "req_1", "req_2"), "fits")
    with journal.open("a") as file:
        file.write('{"name": "req_2", "ke')  # the process was killed there
    final = root / "req_0" / "final.pt"
    before = final.stat()
    final.write_bytes(bytes(before.st_size))  # unseen: same size and time
    os.utime(final, ns=(before.st_atime_ns, before.st_mtime_ns))
    (root / "req_1" / "aux_0.pt").write_bytes(b"cut")  # seen
    assert looked(captured, root, journal) == {
        "req_0": "fits",
        "req_1": "unreadable",
        "req_2": "fits",
    }


def test_a_journal_about_another_dump_is_not_believed(captured: Captured, tmp_path: Path) -> None:
    write_request(tmp_path, 0, captured.states[0])
    requests = Dump.scan(tmp_path).requests
    looked(captured, tmp_path, tmp_path / "journal.jsonl")
    other = Journal(tmp_path / "journal.jsonl", about={"dump": "another"})
    assert other.read(requests) == {}


def test_of_several_requests_for_one_sample_one_is_first(
    captured: Captured, tmp_path: Path
) -> None:
    states = captured.states[1]
    for number in (3, 10, 9):
        write_request(tmp_path, number, states)
    other = [one.clone() for one in states]
    other[1][20] *= 1.01
    write_request(tmp_path, 4, other)
    requests = Dump.scan(tmp_path).requests
    fitting, left_out = claims(requests, captured.judge(tmp_path))
    assert [request.name for request in fitting[1]] == ["req_3", "req_4"]
    same = ("duplicate", "the same bytes as req_3")
    assert left_out == {"req_9": same, "req_10": same}


def test_links_and_gaps_in_a_dump_are_named(captured: Captured, tmp_path: Path) -> None:
    root = tmp_path / "dump"
    write_request(tmp_path / "elsewhere", 0, captured.states[0])
    write_request(root, 1, captured.states[1])
    write_request(root, 2, captured.states[2])
    (root / "req_0").symlink_to(tmp_path / "elsewhere" / "req_0")
    (root / "req_1" / "aux_1.pt").unlink()
    final = root / "req_2" / "final.pt"
    final.rename(tmp_path / "final.pt")
    final.symlink_to(tmp_path / "final.pt")
    (root / "req_3").mkdir()
    os.mkfifo(root / "req_3" / "aux_0.pt")
    (root / "notes.txt").write_text("left alone")
    found = {name: one.outcome for name, one in captured.judge(root).items()}
    assert found == {
        "req_0": "link",
        "req_1": "incomplete",
        "req_2": "link",
        "req_3": "unreadable",
    }
    assert Dump.scan(root).others == 1


def test_a_folder_without_requests_is_no_dump(tmp_path: Path) -> None:
    (tmp_path / "request_0").mkdir()
    with pytest.raises(Fault, match="none of them named req_N"):
        Dump.scan(tmp_path)
    with pytest.raises(Fault, match="No such file"):
        Dump.scan(tmp_path / "absent")
