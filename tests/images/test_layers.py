"""What the built images are made of: every layer, and what is told of it."""

import re
import ssl
import subprocess
import sys
from pathlib import Path

import certifi
import pytest

from pipeline.slate.files import read_json, sha256_file
from tests.images import checks
from tests.images.conftest import IMAGES, ROOT, TAGS, VERSION, inspect, tag_of
from tests.images.saved import SavedImage, certificates_in, read_image

pytestmark = pytest.mark.images


@pytest.fixture(scope="session")
def extra_certificates() -> frozenset[str]:
    """Those that this machine trusts and no package brings: of a network that inspects TLS."""
    trusted = ssl.get_default_verify_paths().cafile
    if trusted is None:
        return frozenset()
    public = [Path(certifi.where()), *Path("/usr/share/ca-certificates").rglob("*.crt")]
    known = [certificates_in(path.read_bytes()) for path in public]
    return certificates_in(Path(trusted).read_bytes()).difference(*known)


@pytest.fixture(scope="session")
def private_values() -> list[str]:
    """Addresses and folders that this machine's pip is told of."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    )
    return re.findall(r"(?:https?://|file://)?/[^\s'\"\\]+", listed.stdout)


def test_no_file_of_the_build_or_of_an_account_is_in_a_layer(saved: SavedImage) -> None:
    assert checks.foreign_files(saved) == []
    assert checks.secrets(saved) == []


def test_no_certificate_is_in_a_layer_but_those_of_packages(
    saved: SavedImage, extra_certificates: frozenset[str]
) -> None:
    assert checks.certificates(saved, extra=extra_certificates) == []


def test_nothing_secret_is_in_environment_labels_or_history(
    saved: SavedImage, private_values: list[str]
) -> None:
    assert checks.told(saved.config, private=private_values) == []


def test_no_file_runs_with_another_s_rights(saved: SavedImage) -> None:
    assert checks.setuid(saved) == []


def test_the_trainer_has_no_compiler() -> None:
    assert checks.compilers(read_image(tag_of("trainer"))) == []


def test_the_user_is_a_number_and_not_root(saved: SavedImage) -> None:
    assert checks.user(saved.config) == []


def test_the_labels_tell_version_and_commit(name: str, saved: SavedImage) -> None:
    labels = saved.config["config"]["Labels"]
    facts = read_json(IMAGES / "images.json")
    assert labels["cleanslate.image"] == name.removesuffix("-cpu")
    assert labels["cleanslate.image"] in labels["org.opencontainers.image.title"]
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.revision"] == facts["commit"]
    assert labels["org.opencontainers.image.description"]


def test_the_record_names_the_images_that_are_there() -> None:
    facts = read_json(IMAGES / "images.json")
    assert facts["version"] == VERSION
    for name, recorded in facts["images"].items():
        found = inspect(recorded["id"])
        base = inspect(facts.get(f"{name}_base", facts["base"])["id"])
        assert found is not None
        assert base is not None
        cpu = name == "extractor" and recorded["variant"] == "cpu"
        assert TAGS[f"{name}-cpu" if cpu else name] in found["RepoTags"]
        lowest = base["RootFS"]["Layers"]
        assert found["RootFS"]["Layers"][: len(lowest)] == lowest


def test_the_images_were_built_from_the_files_that_are_here() -> None:
    inputs = read_json(IMAGES / "images.json")["inputs"]
    files = {path: wanted for path, wanted in inputs.items() if (ROOT / path).is_file()}
    assert {"Dockerfile", "VERSION", "docker/trainer/requirements.txt"} <= set(files)
    assert checks.differences({path: sha256_file(ROOT / path) for path in files}, files) == []
