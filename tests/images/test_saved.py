"""What a container sees of layers, and what is read out of files."""

import io
import tarfile

import pytest

from tests.images.saved import Entry, SavedImage, certificates_in, read_layer


def entry(path: str, mode: int = 0o644) -> Entry:
    return Entry(path, mode, is_file=True)


def test_a_container_sees_the_highest_layer_s_file() -> None:
    image = SavedImage({}, [[entry("a/b", 0o4755)], [entry("a/b", 0o755)]])
    assert [one.mode for one in image.merged().values()] == [0o755]


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ("a/.wh.b", {"a/bc", "d"}),
        (".wh.a", {"d"}),
        ("a/.wh..wh..opq", {"a/new", "d"}),
    ],
)
def test_a_container_sees_nothing_that_a_later_layer_took_away(gone: str, left: set[str]) -> None:
    low = [entry("a/b"), entry("a/b/c"), entry("a/bc"), entry("d")]
    high = [entry(gone), *([entry("a/new")] if "a/new" in left else [])]
    seen = SavedImage({}, [low, high]).merged()
    assert set(seen) == left - ({"a/bc"} if "a/new" in left else set())


def test_certificates_are_the_same_however_their_lines_are_broken() -> None:
    body = "MIIDabcd" * 40
    folded = "\r\n".join(body[at : at + 64] for at in range(0, len(body), 64))
    texts = (
        f"# it\n-----BEGIN CERTIFICATE-----\n{one}\n-----END CERTIFICATE-----\n"
        for one in (body, folded)
    )
    assert len({certificates_in(text.encode()) for text in texts}) == 1


def test_a_layer_s_entries_have_modes_and_what_is_in_them() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as layer:
        for name, text in (
            ("./etc/key", f"-----BEGIN {'EC PRIVATE'} KEY-----\nMIIE\n"),
            ("etc/list", "deb https://me:pass@host/debian x main\n"),
            ("etc/help", "as in https://user:password@host, -----BEGIN PRIVATE KEY-----...\n"),
        ):
            told = tarfile.TarInfo(name)
            told.size, told.mode = len(text), 0o4711
            layer.addfile(told, io.BytesIO(text.encode()))
    stream.seek(0)
    key, listed, help_text = read_layer(stream)
    assert (key.path, key.mode, key.private_key, key.password) == ("etc/key", 0o4711, True, False)
    assert (listed.private_key, listed.password) == (False, True)
    assert not help_text.private_key
