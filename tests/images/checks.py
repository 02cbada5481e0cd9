"""What must not be in an image. Each check gives a line for each thing that it found."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.images.saved import SavedImage

PYTHON = "/opt/cleanslate/bin/python"
_PACKAGES = re.compile(r"opt/cleanslate/lib/python3\.11/site-packages/")
_DEBIAN_WHEELS = "usr/share/python-wheels/"  # pip and setuptools, for new virtual environments
_FOREIGN = re.compile(
    r"(.*/)?(pip\.conf|\.?netrc|\.pypirc|\.git-credentials|id_(rsa|ed25519|ecdsa)|\.env|setup\.log"
    r"|[^/]+\.whl|etc/apt/sources\.list(\.d/.+)?|(\.git|\.ssh|\.aws|\.docker|\.cache|docker/inputs)/.+)"
)
_BIN = r"((usr/(local/)?)?s?bin|opt/cleanslate/bin|usr/local/cuda[^/]*/bin)"
_COMPILER = re.compile(
    rf"{_BIN}/([a-z0-9_]+-linux-gnu-)?(gcc|g\+\+|cc|c\+\+|cpp|clang(\+\+)?|ld|as|nvcc|rustc|go|tcc)"
    r"(-[0-9.]+)?|.*/(cc1(plus)?|cicc)"
)
_SECRET_NAME = re.compile(r"\b\w*(TOKEN|SECRET|PASSWORD|CREDENTIAL|INDEX_URL|PROXY|CERT)\w*=", re.I)


def foreign_files(image: SavedImage) -> list[str]:
    """Files of the build, or of somebody's account, in any layer."""
    return [
        one.path
        for one in image.entries
        if one.is_file
        and _FOREIGN.fullmatch(one.path)
        and not one.path.startswith(_DEBIAN_WHEELS)
        and not _PACKAGES.match(one.path)
    ]


def secrets(image: SavedImage) -> list[str]:
    """Files of any layer with a private key or an address with a password in it.

    Code of packages is left out: it is locked by hash, and has both in its examples and tests.
    """
    return [
        one.path
        for one in image.entries
        if (one.private_key or one.password)
        and (not _PACKAGES.match(one.path) or ".dist-info/" in one.path)
        and not one.path.startswith(("usr/lib/python3", "usr/share/"))
    ]


def certificates(image: SavedImage, *, extra: frozenset[str] = frozenset()) -> list[str]:
    """Files of any layer with a certificate that no package brought.

    extra: sha256 of certificates that this machine trusts beyond the public ones.
    """
    public: frozenset[str] = frozenset()
    for one in image.entries:
        if one.path.startswith("usr/share/ca-certificates/"):
            public |= one.certificates
    return [
        one.path
        for one in image.entries
        if one.certificates & (extra - public)
        or (one.certificates - public and not _PACKAGES.match(one.path))
    ]


def setuid(image: SavedImage) -> list[str]:
    """Files that a container sees and that run with another's rights."""
    return [path for path, one in image.merged().items() if one.is_file and one.mode & 0o6000]


def compilers(image: SavedImage) -> list[str]:
    """Compilers and linkers that a container sees."""
    return [path for path in image.merged() if _COMPILER.fullmatch(path)]


def told(config: Mapping[str, Any], *, private: Iterable[str] = ()) -> list[str]:
    """Lines of environment, labels and history that name a secret or repeat a private value."""
    own = config["config"]
    lines = [
        *(own.get("Env") or []),
        *(f"{key}={value}" for key, value in (own.get("Labels") or {}).items()),
        *(step.get("created_by", "") for step in config["history"]),
    ]
    return [
        line
        for line in lines
        if _SECRET_NAME.search(line) or any(value in line for value in private)
    ]


def user(config: Mapping[str, Any]) -> list[str]:
    """The user, when it is not a number, or is root."""
    name = config["config"].get("User") or ""
    return [] if re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", name) else [f"user {name!r}"]


def differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Names that only one side has, or that have another value on each."""
    both = {**wanted, **found}
    return [
        f"{name}: {found.get(name, 'absent')}, wanted {wanted.get(name, 'absent')}"
        for name in sorted(both)
        if found.get(name) != wanted.get(name)
    ]


def pins(locks: Iterable[Path]) -> dict[str, str]:
    """Package -> version of lock files, names as indexes spell them."""
    lines = [line for lock in locks for line in lock.read_text(encoding="utf-8").splitlines()]
    pinned = [re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", line) for line in lines]
    return {plain(match[1]): match[2] for match in pinned if match}


def plain(name: str) -> str:
    """A package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()
