"""Writes the locks of docker/extractor from the .in files there. Run by `make lock`.

requirements-cuda.txt is pip-compile's: all that sglang names. requirements-cpu.txt is not, since
sglang names packages that exist for GPUs only: its list is closed by hand and installed with
--no-deps. The hashes are those that PyPI states for every file of a pinned version, and those of
files of that version in pip's find-links (another build of torch, for instance).
"""

import hashlib
import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lock import HEAD, compile_lock
from pip._internal.models.index import PyPI

EXTRACTOR = Path(__file__).parent / "extractor"
_ACCEPT = {"Accept": "application/vnd.pypi.simple.v1+json"}
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)$")


def read_pins(path: Path) -> list[tuple[str, str]]:
    """(package, version) of every line; ValueError for a line that is neither pin nor comment."""
    pins = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = _PIN.match(line.strip())
        if match is None:
            raise ValueError(f"{path}: {line!r} is not package==version")
        pins.append((match[1], match[2]))
    return pins


def index() -> str:
    """The index in use: the one that pip is told, else pip's own default."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        check=False,
        capture_output=True,
        text=True,
    )
    return told.stdout.strip().rstrip("/") or PyPI.simple_url.rstrip("/")


def index_hashes(package: str, version: str) -> set[str]:
    """sha256 of every file of a version that PyPI offers."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    request = urllib.request.Request(f"{index()}/{name}/", headers=_ACCEPT)  # noqa: S310  https
    with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
        files = json.load(reply)["files"]
    return {file["hashes"]["sha256"] for file in files if is_of(file["filename"], package, version)}


def is_of(file_name: str, package: str, version: str) -> bool:
    """Whether a wheel or source archive is of that package and version, whatever its build."""
    stem = re.sub(r"\.(whl|tar\.gz|zip)$", "", file_name)
    if file_name.endswith(".whl"):
        found_name, found_version = stem.split("-")[:2]
    else:
        found_name, _, found_version = stem.rpartition("-")
    plain = re.sub(r"[-_.]+", "-", found_name).lower()
    return (
        plain == re.sub(r"[-_.]+", "-", package).lower()
        and found_version.partition("+")[0] == version
    )


def find_links() -> list[Path]:
    """Folders that pip is told to look into."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    )
    found = re.findall(r"find-links='([^']*)'", done.stdout)
    return [Path(one) for value in found for one in value.split() if Path(one).is_dir()]


def lock_cpu() -> list[str]:
    """The blocks of the CPU server's lock."""
    pins = read_pins(EXTRACTOR / "requirements-cpu.in")
    with ThreadPoolExecutor(4) as pool:
        stated = list(pool.map(lambda pin: index_hashes(*pin), pins))
    local = {path for folder in find_links() for path in folder.glob("*.whl")}
    blocks = []
    for (package, version), hashes in zip(pins, stated, strict=True):
        own = [path for path in local if is_of(path.name, package, version)]
        hashes |= {hashlib.sha256(path.read_bytes()).hexdigest() for path in own}
        if not hashes:
            raise SystemExit(f"PyPI offers no file of {package} {version}")
        lines = [f"{package}=={version}", *(f"--hash=sha256:{one}" for one in sorted(hashes))]
        blocks.append(" \\\n    ".join(lines))
    return blocks


def main() -> None:
    """Writes the two locks."""
    cuda = compile_lock(EXTRACTOR / "requirements-cuda.in", plain_index=True)
    for variant, blocks in (("cpu", lock_cpu()), ("cuda", list(cuda.values()))):
        out = EXTRACTOR / f"requirements-{variant}.txt"
        out.write_text(HEAD + "\n".join(blocks) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
