"""Real files and commands of this machine."""

import sys
import time
from pathlib import Path

from pipeline.host.reader import HostReader, Missing, Output
from tests.processes import await_ends

HERE = HostReader()


def test_a_command_gives_status_words_and_errors() -> None:
    said = HERE.command("sh", "-c", "echo out; echo one >&2; echo two >&2; exit 4")
    assert said == Output(4, "out\n", "one\ntwo\n")
    assert said.last_error == "two"
    assert Output(7, "", "").last_error == "ended with 7"


def test_an_absent_command_is_missing_by_name() -> None:
    said = HERE.command("no-such-tool-of-ours", "--version")
    assert isinstance(said, Missing)
    assert said.reason.startswith("no-such-tool-of-ours: ")
    assert not said.hung


def test_a_command_that_hangs_is_a_result_and_leaves_no_child(tmp_path: Path) -> None:
    started = time.monotonic()
    pid = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid}; wait"
    said = HERE.command("sh", "-c", script, seconds=1.0)
    assert isinstance(said, Missing)
    assert said.hung
    assert "sh did not answer in 1 s" in said.reason
    assert time.monotonic() - started < 10
    await_ends([int(pid.read_text())], within=5.0)


def test_commands_speak_english_and_find_tools_of_root() -> None:
    script = "import os; print(os.environ['LC_ALL'], os.environ['PATH'])"
    said = HERE.command(sys.executable, "-c", script)
    assert isinstance(said, Output)
    language, path = said.text.split()
    assert language == "C"
    assert path.endswith(":/usr/sbin:/sbin")


def test_a_file_that_is_no_text_is_still_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\xffb")
    assert HostReader(tmp_path).text("/x") == "a\ufffdb"


def test_what_is_not_there_is_missing_by_path(tmp_path: Path) -> None:
    reader = HostReader(tmp_path)
    for read in (reader.text, reader.names, reader.entry, reader.room):
        found = read("/no/such")
        assert isinstance(found, Missing)
        assert "/no/such: No such file" in found.reason


def test_owner_kind_and_live_size_are_of_the_place_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0o640)
    reader = HostReader(tmp_path)
    found, folder, room = reader.entry("/file"), reader.entry("/"), reader.room("/")
    assert not isinstance(found, Missing)
    assert (found.uid, found.mode, found.folder) == (tmp_path.stat().st_uid, 0o640, False)
    assert not isinstance(folder, Missing)
    assert folder.folder
    assert not isinstance(room, Missing)
    assert room.bytes >= room.free_bytes > 0
    assert reader.names("/") == ("file",)
