"""Reading once: the right digest at every size, the next piece on its way, nothing left open."""

import hashlib
import os
import threading
from pathlib import Path

import pytest

from pipeline.slate import reread
from pipeline.slate.reread import digest_once

PIECE = 8192  # of pages


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reread, "PIECE_BYTES", PIECE)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, 5 * PIECE + 7])
def test_every_byte_is_hashed_and_seen_once_in_order(
    tmp_path: Path, size: int, direct: bool
) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    seen = bytearray()
    digest = digest_once(tmp_path / "file", direct=direct, see=seen.extend)
    assert digest == hashlib.sha256(data).hexdigest()
    assert bytes(seen) == data


def test_the_next_piece_is_read_while_one_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(os.urandom(3 * PIECE))
    begun = {at: threading.Event() for at in (0, PIECE, 2 * PIECE, 3 * PIECE)}
    read = reread._File.read

    def told(file: reread._File, buffer: memoryview, at: int) -> memoryview:
        begun[at].set()
        return read(file, buffer, at)

    monkeypatch.setattr(reread._File, "read", told)
    waited = []

    def see(piece: memoryview) -> None:
        if len(waited) < 2:  # the third is the last
            waited.append(begun[(len(waited) + 1) * PIECE].wait(30))

    digest_once(tmp_path / "file", direct=False, see=see)
    assert waited == [True, True]


@pytest.mark.parametrize("pieces", [1, 5], ids=["shrinks", "grows"])
def test_a_file_that_changes_meanwhile_is_read_to_where_it_ends(
    tmp_path: Path, pieces: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 4 * PIECE)
    lengths: list[int] = []

    def see(piece: memoryview) -> None:
        if not lengths:
            os.truncate(path, pieces * PIECE)
        lengths.append(len(piece))

    digest_once(path, direct=False, see=see)
    assert sum(lengths) in {pieces * PIECE, max(pieces, 2) * PIECE}  # one was on its way already


def test_who_looks_may_stop_it_and_nothing_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * PIECE))

    def see(_piece: memoryview) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        digest_once(path, direct=True, see=see)
    opened = Path("/proc/self/fd").iterdir()
    assert path not in [file.readlink() for file in opened if file.is_symlink()]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "absent"])
def test_what_is_no_plain_file_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "link":
        (tmp_path / "other").write_bytes(b"x")
        path.symlink_to("other")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(OSError, match="file"):
        digest_once(path, direct=False, see=lambda _piece: None)
