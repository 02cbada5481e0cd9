"""The images of this version that `make images` built; a test that wants one runs on each."""

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from tests.images import checks
from tests.images.running import running
from tests.images.saved import SavedImage, read_image

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
LOCKS = ROOT / "docker"
VERSION = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
TAGS = {
    "trainer": f"cleanslate-trainer:{VERSION}",
    "extractor": f"cleanslate-extractor:{VERSION}",
    "extractor-cpu": f"cleanslate-extractor:{VERSION}-cpu",
}


def inspect(image: str) -> dict[str, Any] | None:
    """What the engine says of an image; None when it has none of that name."""
    done = subprocess.run(
        ["docker", "image", "inspect", image], capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout)[0] if done.returncode == 0 else None


def locked(name: str, found: Iterable[str]) -> dict[str, str]:
    """Package -> version that an image has by its locks. found: the packages in it."""
    if name == "extractor":
        return checks.pins([LOCKS / "extractor" / "requirements-cuda.txt"])
    if name == "extractor-cpu":
        return checks.pins([LOCKS / "extractor" / "requirements-cpu.txt"])
    cuda = checks.pins([LOCKS / "trainer" / "requirements-cuda.txt"])
    own = (LOCKS / "trainer" / f"requirements{one}.txt" for one in ("", "-torch"))
    # A CPU build of torch asks for none of the CUDA libraries, another for all.
    return checks.pins(own) | (cuda if cuda.keys() & set(found) else {})


def tag_of(name: str) -> str:
    """The tag, when the last `make images` built it: of the extractor, one variant of two."""
    path = IMAGES / "images.json"
    made = json.loads(path.read_text("utf-8"))["images"] if path.is_file() else {}
    recorded = made.get(name.removesuffix("-cpu"), {})
    if recorded and "extractor" in name and ("cpu" in name) != (recorded["variant"] == "cpu"):
        pytest.skip(f"{TAGS[name]} is not what make images built last")
    found = inspect(TAGS[name])
    if not recorded or found is None or found["Id"] != recorded["id"]:
        pytest.fail(f"no image {TAGS[name]} as images.json records it: make images")
    return TAGS[name]


@pytest.fixture(scope="session", params=TAGS)
def name(request: pytest.FixtureRequest) -> str:
    """A key of TAGS whose image is built."""
    tag_of(request.param)
    return str(request.param)


@pytest.fixture(scope="session", params=[one for one in TAGS if one != "trainer"])
def extractor(request: pytest.FixtureRequest) -> str:
    tag_of(request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def saved(name: str) -> SavedImage:
    return read_image(TAGS[name])


@pytest.fixture(scope="session")
def host(name: str) -> Iterator[Host]:
    with running(TAGS[name]) as host:
        yield host
