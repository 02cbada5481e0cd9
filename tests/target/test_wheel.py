import os
import stat
import zipfile
from pathlib import Path

import pytest

from pipeline.slate.files import sha256_file
from pipeline.target.errors import WheelError
from pipeline.target.wheel import WheelPin, extract_member, fetch_wheel


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def small_wheel(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    info = "cleanslate_fixture-1.0.dist-info"
    return write_wheel(
        folder / "cleanslate_fixture-1.0-py3-none-any.whl",
        {
            "cleanslate_fixture/data.txt": text.encode(),
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: cleanslate-fixture\nVersion: 1.0\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
        },
    )


@pytest.fixture
def pip_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in the only place where pip looks: nothing leaves this machine."""
    wheel = small_wheel(tmp_path / "index", "hello")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_a_pinned_wheel_is_fetched_whole_and_nothing_else_is_left(
    pip_finds: Path, tmp_path: Path
) -> None:
    pin = WheelPin("cleanslate-fixture", "1.0", sha256_file(pip_finds))
    found = fetch_wheel(pin, tmp_path / "into")
    assert found.read_bytes() == pip_finds.read_bytes()
    assert list((tmp_path / "into").iterdir()) == [found]


def test_a_wheel_of_another_digest_is_refused_and_not_kept(pip_finds: Path, tmp_path: Path) -> None:
    pin = WheelPin("cleanslate-fixture", "1.0", "0" * 64)
    with pytest.raises(WheelError, match=r"cleanslate-fixture==1\.0") as caught:
        fetch_wheel(pin, tmp_path / "into")
    assert "0" * 64 in str(caught.value)
    assert list((tmp_path / "into").iterdir()) == []


def test_a_wheel_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = small_wheel(tmp_path / "into", "hello")
    pin = WheelPin("no-such-package-anywhere", "1.0", sha256_file(wheel))
    assert fetch_wheel(pin, wheel.parent) == wheel


def test_a_member_is_copied_under_its_last_name(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "a.whl", {"deep/er/model.bin": b"1234"})
    copied = extract_member(wheel, "deep/er/model.bin", tmp_path / "out")
    assert copied == tmp_path / "out" / "model.bin"
    assert copied.read_bytes() == b"1234"


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil", ""])
def test_an_unsafe_member_name_is_refused(tmp_path: Path, name: str) -> None:
    wheel = write_wheel(tmp_path / "a.whl", {"a": b"", "../evil": b"x"})
    with pytest.raises(WheelError, match="unsafe"):
        extract_member(wheel, name, tmp_path / "out")


def test_a_link_in_the_archive_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(WheelError, match="link"):
        extract_member(wheel, "link", tmp_path / "out")


def test_an_absent_member_is_named(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "a.whl", {"there": b""})
    with pytest.raises(WheelError, match=r"'gone'.*there"):
        extract_member(wheel, "gone", tmp_path / "out")


def test_a_damaged_member_leaves_no_file(tmp_path: Path) -> None:
    data = os.urandom(5000)
    wheel = write_wheel(tmp_path / "a.whl", {"model.bin": data})
    raw = bytearray(wheel.read_bytes())
    raw[2000] ^= 1
    wheel.write_bytes(raw)
    with pytest.raises(WheelError, match="CRC"):
        extract_member(wheel, "model.bin", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
