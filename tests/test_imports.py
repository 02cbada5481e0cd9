"""Rooms import only rooms below them, and the capture's contract needs no trainer."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pipeline"
ORDER = [
    "cli", "stages", "report", "evaluation", "training", "conversations", "capture", "draft",
    "adoption", "store", "target", "nccl", "slate", "host", "containers", "settings", "kernels",
    "faults",
]  # fmt: skip


def rooms_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        found |= {name.split(".")[1] for name in names if name.startswith("pipeline.")}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = room_of(path)
    below = {*ORDER[ORDER.index(room) :]}
    assert rooms_imported(path) <= below


def test_every_room_says_what_it_owns() -> None:
    rooms = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "profiles"]
    for room in rooms:
        if room.name == "__pycache__":
            continue
        docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8")))
        assert docstring, room
        assert room.name in ORDER


def test_no_module_is_larger_than_it_should_be() -> None:
    sizes = {path: len(path.read_text("utf-8").splitlines()) for path in MODULES}
    assert not {str(path): size for path, size in sizes.items() if size > 450}
