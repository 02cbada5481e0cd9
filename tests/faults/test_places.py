"""Links, full and read-only file systems, clocks: where a run lies and what is done to it there."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.stages.conftest import Project

from .running import refuses, start, state_of, three_parts, until

pytestmark = pytest.mark.faults


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """A mount while the context lasts; needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, check=False)
    assert done.returncode == 0, f"these tests mount file systems, as root: {done.stderr!r}"
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Takes the last byte of a file system."""
    with (folder / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def test_a_link_in_place_of_an_output_is_refused_and_its_end_untouched(project: Project) -> None:
    elsewhere = project.root.parent / "elsewhere"
    (project.folder / "export").rename(elsewhere)
    (project.folder / "export").symlink_to(elsewhere)
    before = sorted(path.name for path in elsewhere.iterdir())
    assert "is a symlink" in refuses(project, "export")
    assert sorted(path.name for path in elsewhere.iterdir()) == before


def test_a_link_in_place_of_the_staging_folder_is_refused_and_its_end_untouched(
    project: Project,
) -> None:
    elsewhere = project.root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("years")
    sealed = state_of(project, "extract")
    (project.root / "staging").rmdir()
    (project.root / "staging").symlink_to(elsewhere)
    assert "is a symlink" in refuses(project, "extract")
    assert state_of(project, "extract") == sealed
    assert (elsewhere / "thesis.tex").read_text() == "years"


def test_a_link_in_place_of_a_shard_is_captured_again_by_a_resume(project: Project) -> None:
    straight = state_of(project, "extract")
    output = project.folder / "extract"
    (output / "manifest.json").unlink()
    shard = output / "states-00000.safetensors"
    elsewhere = shard.rename(project.root.parent / "elsewhere")
    shard.symlink_to(elsewhere)
    command = start(project, "extract", "--resume")
    assert command.wait() == 0, command.said
    assert "is a link: captured again" in command.out.read_text()
    assert not shard.is_symlink()
    assert state_of(project, "extract") == straight


def test_a_link_in_place_of_the_lock_is_refused_and_its_end_untouched(project: Project) -> None:
    mine = project.root.parent / "mine"
    mine.write_text("x")
    (project.folder / ".lock").unlink()
    (project.folder / ".lock").symlink_to(mine)
    assert "symbolic links" in refuses(project, "export")
    assert mine.read_text() == "x"


def test_a_run_on_a_read_only_file_system_is_refused(project: Project) -> None:
    sealed = state_of(project, "export")
    root = str(project.root)
    with mounted(project.root, "--bind", root):
        subprocess.run(["mount", "-o", "remount,ro,bind", root], check=True)
        assert "Read-only file system" in refuses(project, "export")
    assert state_of(project, "export") == sealed


def test_a_log_that_cannot_be_written_is_named_and_nothing_is_wiped(project: Project) -> None:
    sealed = state_of(project, "export")
    logs = project.folder / "logs"
    with mounted(logs, "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        fill(logs)
        said = refuses(project, "export")
    assert f"{logs}/" in said
    assert "No space left on device" in said
    assert state_of(project, "export") == sealed


def test_a_staging_folder_without_room_for_the_quota_is_refused_before_the_wipe(
    project: Project,
) -> None:
    sealed = state_of(project, "extract")
    with mounted(project.root / "staging", "-t", "tmpfs", "-o", "size=512k", "tmpfs"):
        said = refuses(project, "extract")
    assert "(tmpfs) has 0 MiB free" in said
    assert state_of(project, "extract") == sealed


def test_a_staging_folder_that_others_fill_is_named_with_bytes_and_a_resume_is_whole(
    project: Project,
) -> None:
    straight = state_of(project, "extract")
    staging = project.root / "staging"
    with mounted(staging, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        command = start(project, "extract")
        until(lambda: list(staging.glob("tiny-*/.cleanslate.json")))  # its engine loads meanwhile
        fill(staging)
        assert command.wait() == 1
        said = three_parts(command.said)
        (staging / "ballast").unlink()
        assert f"{staging}/tiny-" in said
        assert "bytes of 00000000.safetensors cannot be written" in said
        assert "No space left on device" in said
        assert "0 are free" in said
        assert state_of(project, "extract") == "unsealed"
        assert list(staging.glob("tiny-*")) == []
        command = start(project, "extract", "--resume")
        assert command.wait() == 0, command.said
    assert state_of(project, "extract") == straight


def test_files_of_the_future_change_nothing(project: Project) -> None:
    straight = state_of(project, "export")
    for path in project.folder.rglob("*"):
        os.utime(path, (4_000_000_000, 4_000_000_000))  # the year 2096: the clock was set back
    command = start(project, "export")
    assert command.wait() == 0, command.said
    assert state_of(project, "export") == straight


def test_clean_slate_takes_what_a_killed_extraction_left_in_the_staging_folder(
    project: Project,
) -> None:
    command = start(project, "extract")
    staging = project.root / "staging"
    until(lambda: list(staging.glob("tiny-*/.cleanslate.json")))
    command.process.kill()
    assert command.wait() == -9
    assert list(staging.glob("tiny-*"))
    command = start(project, "clean-slate")
    assert command.wait() == 0, command.said
    assert list(staging.iterdir()) == []
