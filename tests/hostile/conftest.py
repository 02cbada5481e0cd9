import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.bounded import Bounded
from tests.hostile.good import make_all


@pytest.fixture(scope="session")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bounded]:
    """Readers behind a wall: bounded in memory and time."""
    server = Bounded(tmp_path_factory.mktemp("bounded") / "log")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole file for each reader. Not to be changed."""
    return make_all(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def good(whole: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """A copy of all of them."""
    root = whole["json"].parent.parent
    shutil.copytree(root, tmp_path / "good")
    return {name: tmp_path / "good" / path.relative_to(root) for name, path in whole.items()}
