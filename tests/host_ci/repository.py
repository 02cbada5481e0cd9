"""Local package repositories for the converge test: SIMULATED ones, and Debian's own packages.

Everything is signed by a key that is made for one test run and thrown away with it, so that roles
verify signatures as they do elsewhere. Flat repositories, read by `file:` without a network.
"""

import gzip
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "ansible" / "ci" / "packages.yml"
KEY = "key.asc"
SUITE = "bookworm"  # of docker/base/build.sh
_EPOCH = "1795910400"  # of docker/base/build.sh: equal input, equal packages


@dataclass(frozen=True)
class Package:
    """One SIMULATED package. files: absolute path -> text."""

    name: str
    version: str
    depends: tuple[str, ...]
    files: dict[str, str]

    @property
    def control(self) -> str:
        """DEBIAN/control of it."""
        depends = f"Depends: {', '.join(self.depends)}\n" if self.depends else ""
        return (
            f"Package: {self.name}\nVersion: {self.version}\nArchitecture: {_architecture()}\n"
            f"Maintainer: Cleanslate CI <ci@localhost>\n{depends}"
            f"Description: SIMULATED stand-in for {self.name}\n"
            " Made by tests/host_ci for a test of the playbook. It does nothing.\n"
        )


def simulated(described: dict[str, Any], wanted: dict[str, str]) -> dict[str, list[Package]]:
    """Repository -> its packages, from packages.yml and the versions that ready_host wants."""
    given: dict[str, list[Package]] = {}
    for repository, packages in described["simulated"].items():
        given[repository] = []
        for name, body in packages.items():
            if "version" in body:
                versions = [body["version"]]
            else:
                versions = [wanted[body.get("version_of", name)], described["newer"]]
            given[repository] += [_package(name, body, version) for version in versions]
    return given


def _package(name: str, body: dict[str, Any], version: str) -> Package:
    upstream = version.partition("-")[0]
    # Of one version, as NVIDIA's metapackages ask.
    depends = tuple(f"{one} (= {version})" for one in body.get("depends", ()))
    files = body.get("files", {}).items()
    # Not str.format: the files are scripts.
    texts = {path: text.replace("{upstream}", upstream) for path, text in files}
    return Package(
        name,
        version,
        depends,
        {path.replace("{upstream}", upstream): text for path, text in texts.items()},
    )


def build_package(package: Package, folder: Path) -> Path:
    """Writes the package as a .deb file."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        (tree / "DEBIAN").mkdir(parents=True)
        tree.chmod(0o755)
        (tree / "DEBIAN" / "control").write_text(package.control)
        for name, text in package.files.items():
            path = tree / name.removeprefix("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if text.startswith("#!") else 0o644)
        deb = folder / f"{package.name}_{package.version}.deb"
        _run("dpkg-deb", "--build", "--root-owner-group", "-Znone", str(tree), str(deb))
    return deb


def index(folder: Path, key: "Key") -> None:
    """Makes a folder of .deb files a repository: Packages, Release and its signature."""
    stanzas = [
        f"{_run('dpkg-deb', '--field', str(deb)).rstrip()}\nFilename: ./{deb.name}\n"
        f"Size: {deb.stat().st_size}\nSHA256: {_sha256(deb)}\n"
        for deb in sorted(folder.glob("*.deb"))
    ]
    packages = folder / "Packages"
    packages.write_text("\n".join(stanzas))
    packed = folder / "Packages.gz"
    packed.write_bytes(gzip.compress(packages.read_bytes(), mtime=0))
    lines = [f" {_sha256(one)} {one.stat().st_size} {one.name}" for one in (packages, packed)]
    (folder / "Release").write_text(
        f"Origin: cleanslate-ci\nLabel: {folder.name}\nArchitectures: {_architecture()}\n"
        "Date: Sun, 29 Nov 2026 00:00:00 UTC\nSHA256:\n" + "\n".join(lines) + "\n"
    )
    key.sign(folder / "Release", folder / "InRelease")


@dataclass(frozen=True)
class Key:
    """A signing key in a folder of gpg."""

    home: Path

    def sign(self, file: Path, signed: Path) -> None:
        """Writes `file` with a signature around it."""
        self._gpg("--output", str(signed), "--clearsign", str(file))

    def public(self) -> str:
        """The public half, ASCII-armoured, as a publisher offers it."""
        return self._gpg("--armor", "--export")

    def _gpg(self, *arguments: str) -> str:
        return _run("gpg", "--homedir", str(self.home), "--batch", "--quiet", *arguments)


@contextmanager
def throw_away_key() -> Iterator[Key]:
    """A new key, gone at the end."""
    # Not below pytest's folders: gpg's agent listens at a path that may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="cs-key-", ignore_cleanup_errors=True) as home:
        key = Key(Path(home))
        try:
            key._gpg("--passphrase", "", "--quick-generate-key", "SIMULATED", "ed25519", "sign")
            yield key
        finally:
            _run("gpgconf", "--homedir", home, "--kill", "all")


def download(names: Sequence[str], status: Path, folder: Path) -> None:
    """Debian packages, with what they need and a system with this dpkg status lacks, into folder.

    From where this machine's apt gets Debian, as docker/base/build.sh does, with an apt state of
    its own: nothing on this machine changes.
    """
    with tempfile.TemporaryDirectory(prefix="cs-apt-") as scratch:
        state = Path(scratch)
        state.chmod(0o755)  # for apt's own user, who downloads
        sources = state / "sources.list"
        sources.write_text("".join(f"{line}\n" for line in debian_sources()))
        for name in ("lists/partial", "archives/partial"):
            (state / name).mkdir(parents=True)
        options = {
            "Dir::State": scratch,
            "Dir::State::Lists": f"{scratch}/lists",
            "Dir::State::status": str(status),
            "Dir::Cache": scratch,
            "Dir::Cache::Archives": f"{scratch}/archives",
            "Dir::Etc::SourceList": str(sources),
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "Acquire::Languages": "none",
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", "--quiet=2"]
        apt += [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        _run(*apt, "update")
        _run(*apt, "install", "--yes", "--download-only", "--no-install-recommends", *names)
        for deb in (state / "archives").glob("*.deb"):
            (folder / deb.name.replace("%3a", ":")).write_bytes(deb.read_bytes())


def debian_sources() -> list[str]:
    """Lines of sources.list for Debian's main, as this machine's apt reaches it."""
    lines = _run(
        *("apt-get", "indextargets", "--format", "deb $(REPO_URI) $(RELEASE) $(COMPONENT)"),
        *("Created-By: Packages", "Origin: Debian"),
    ).splitlines()
    kept = sorted({line for line in lines if re.search(rf" {SUITE}\S* main$", line)})
    assert kept, f"this machine's apt knows no Debian {SUITE}: its mirror, then apt-get update"
    return kept


def build_repositories(folder: Path, *, wanted: dict[str, str], status: Path) -> dict[str, str]:
    """Writes all repositories and the public key; gives Debian package -> version that is there.

    wanted: package -> version of ready_host. status: dpkg status of the image.
    """
    described = yaml.safe_load(PACKAGES.read_text(encoding="utf-8"))
    folder.chmod(0o755)
    with throw_away_key() as key:
        (folder / KEY).write_text(key.public())
        for name, packages in simulated(described, wanted).items():
            (folder / name).mkdir()
            for package in packages:
                build_package(package, folder / name)
            index(folder / name, key)
        debian = folder / "debian"
        debian.mkdir()
        download(described["debian"], status, debian)
        index(debian, key)
    fields = [_run("dpkg-deb", "--field", str(deb)) for deb in debian.glob("*.deb")]
    return {_field(text, "Package"): _field(text, "Version") for text in fields}


def _field(control: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", control, re.MULTILINE)
    assert found, f"no {name} in {control!r}"
    return found[1]


def _architecture() -> str:
    return _run("dpkg", "--print-architecture").strip()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(*command: str) -> str:
    """What a command prints; its complaint is in the error."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": _EPOCH, "LC_ALL": "C.UTF-8"}  # noqa: TID251
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
