"""The stand-ins for NVIDIA's repositories: what apt reads, signed by a key of this run."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.host_ci.machine import wanted_packages
from tests.host_ci.repository import (
    PACKAGES,
    Package,
    build_package,
    index,
    simulated,
    throw_away_key,
)

pytestmark = pytest.mark.host


def test_every_wanted_package_is_there_and_a_newer_one_too() -> None:
    described = yaml.safe_load(PACKAGES.read_text(encoding="utf-8"))
    made = [one for part in simulated(described, wanted_packages()).values() for one in part]
    known = {(one.name, one.version) for one in made}
    for name, version in wanted_packages().items():
        if name not in described["debian"]:
            assert {(name, version), (name, described["newer"])} <= known


def test_a_package_says_that_it_is_simulated(tmp_path: Path) -> None:
    package = Package("nvidia-open", "1.0-1", ("b (= 1.0-1)",), {"/usr/bin/b": "#!/bin/sh\n"})
    deb = build_package(package, tmp_path)
    fields = subprocess.check_output(["dpkg-deb", "--field", str(deb)], text=True)
    assert "Description: SIMULATED" in fields
    assert "Depends: b (= 1.0-1)" in fields
    listed = subprocess.check_output(["dpkg-deb", "--contents", str(deb)], text=True)
    assert "-rwxr-xr-x root/root" in listed


@pytest.mark.parametrize("file", ["InRelease", "key.asc"])
def test_a_repository_is_believed_by_its_signature_alone(tmp_path: Path, file: str) -> None:
    (folder := tmp_path / "driver").mkdir()
    keyring = tmp_path / "key.asc"
    with throw_away_key() as key, throw_away_key() as other:
        build_package(Package("nvidia-open", "1.0-1", (), {}), folder)
        index(folder, key)
        keyring.write_text(key.public())
        assert _update(tmp_path) == 0
        if file == "key.asc":
            keyring.write_text(other.public())
        else:
            other.sign(folder / "Release", folder / "InRelease.other")
            (folder / "InRelease.other").replace(folder / "InRelease")
        assert _update(tmp_path) != 0


def _update(folder: Path) -> int:
    """Status of `apt-get update` with the repository in `folder` and nothing else."""
    sources = folder / "one.sources"
    sources.write_text(
        f"Types: deb\nURIs: file:{folder}/driver\nSuites: ./\nSigned-By: {folder}/key.asc\n"
    )
    for name in ("lists/partial", "archives/partial"):
        (folder / "state" / name).mkdir(parents=True, exist_ok=True)
    settings = {
        "Dir::State": folder / "state",
        "Dir::Cache": folder / "state",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "APT::Sandbox::User": "root",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    command = ["apt-get", *options, "--quiet=2", "--error-on=any", "update"]
    return subprocess.run(command, capture_output=True, check=False).returncode
