from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.slate.errors import WipeRefused
from pipeline.slate.wipe import (
    MANIFEST,
    MARKER,
    check_wipeable,
    claim,
    drop_partials,
    owned_directories,
    wipe,
)


def owned(root: Path, name: str = "extract") -> Path:
    directory = root / name
    claim(directory, stage=name, intent={})
    return directory


def test_an_owned_directory_is_emptied_and_stays(tmp_path: Path) -> None:
    directory = owned(tmp_path)
    (directory / "deep" / "er").mkdir(parents=True)
    (directory / "deep" / "er" / "file").write_text("x")
    (directory / MANIFEST).write_text("{}")
    wipe(directory, root=tmp_path)
    assert list(directory.iterdir()) == []


def test_wiping_twice_is_wiping_once(tmp_path: Path) -> None:
    directory = owned(tmp_path)
    wipe(directory, root=tmp_path)
    wipe(directory, root=tmp_path)
    assert list(directory.iterdir()) == []


def test_what_a_symlink_points_to_is_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("keep")
    root = tmp_path / "run"
    directory = owned(root)
    (directory / "link").symlink_to(outside)
    wipe(directory, root=root)
    assert (outside / "file").read_text() == "keep"


@pytest.mark.parametrize("path", ["", ".", "/", "relative/path"])
def test_a_path_that_is_no_output_is_refused(path: str) -> None:
    with pytest.raises(WipeRefused):
        wipe(Path(path), root=Path("/"))


def test_a_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = owned(tmp_path, "home")
    monkeypatch.setenv("HOME", str(directory))
    with pytest.raises(WipeRefused, match="home"):
        wipe(directory, root=tmp_path)


def test_a_directory_without_the_marker_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "extract"
    directory.mkdir()
    (directory / "thesis.tex").write_text("years of work")
    with pytest.raises(WipeRefused, match="marker"):
        wipe(directory, root=tmp_path)
    assert (directory / "thesis.tex").exists()


def test_a_marker_of_another_project_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "extract"
    directory.mkdir()
    (directory / MARKER).write_text('{"project": "other"}')
    with pytest.raises(WipeRefused, match="marker"):
        wipe(directory, root=tmp_path)


def test_a_directory_outside_the_root_is_refused(tmp_path: Path) -> None:
    directory = owned(tmp_path / "elsewhere")
    with pytest.raises(WipeRefused, match="not below"):
        wipe(directory, root=tmp_path / "run")


def test_a_way_out_by_dots_is_refused(tmp_path: Path) -> None:
    directory = owned(tmp_path / "elsewhere")
    with pytest.raises(WipeRefused):
        wipe(tmp_path / "run" / ".." / "elsewhere" / "extract", root=tmp_path / "run")
    assert directory.exists()


def test_a_symlink_in_place_of_an_output_is_refused(tmp_path: Path) -> None:
    outside = owned(tmp_path / "outside")
    root = tmp_path / "run"
    root.mkdir()
    (root / "extract").symlink_to(outside)
    with pytest.raises(WipeRefused, match="symlink"):
        wipe(root / "extract", root=root)
    assert (outside / MARKER).exists()


def test_a_mount_point_is_refused() -> None:
    with pytest.raises(WipeRefused):
        check_wipeable(Path("/proc"), root=Path("/"))


def test_a_claim_never_takes_a_directory_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "extract").mkdir()
    (tmp_path / "extract" / "file").write_text("x")
    with pytest.raises(WipeRefused, match="holds 1 entries"):
        claim(tmp_path / "extract", stage="extract", intent={})


def test_only_owned_directories_are_listed(tmp_path: Path) -> None:
    first, second = owned(tmp_path, "a"), owned(tmp_path / "b", "c")
    (tmp_path / "logs").mkdir()
    assert owned_directories(tmp_path) == [first, second]


def test_partial_files_go_and_whole_ones_stay(tmp_path: Path) -> None:
    directory = owned(tmp_path)
    (directory / ".states-00000.partial").write_text("half")
    (directory / ".step-00000001.partial").mkdir()
    (directory / ".step-00000001.partial" / "x").write_text("half")
    (directory / "states-00001.json").write_text("whole")
    drop_partials(directory)
    assert sorted(path.name for path in directory.iterdir()) == [MARKER, "states-00001.json"]


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=12)


@settings(max_examples=40)
@given(names=st.lists(NAMES.filter(lambda name: name not in (".", "..")), unique=True, max_size=6))
def test_whatever_the_names_nothing_is_left(
    names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("run")
    directory = owned(root)
    for name in names:
        if name != MARKER:
            (directory / name).write_text("x")
    wipe(directory, root=root)
    assert list(directory.iterdir()) == []
