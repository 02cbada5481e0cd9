import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.containers.errors import ContainerError
from pipeline.containers.images import BuiltImages, check_same_code

RECORD: dict[str, Any] = {
    "version": "1.2.3",
    "commit": "c0ffee",
    "dirty": False,
    "base": {"id": "sha256:base", "tar_sha256": "aa"},
    "images": {
        "trainer": {"id": "sha256:t", "variant": None, "bytes": 1},
        "extractor": {"id": "sha256:e", "variant": "cpu", "bytes": 2},
    },
    "inputs": {"VERSION": "bb"},
}


def read(folder: Path, **changes: Any) -> BuiltImages:
    path = folder / "images.json"
    path.write_text(json.dumps({**RECORD, **changes}))
    return BuiltImages.read(path)


def test_a_manifest_names_image_base_and_inputs(tmp_path: Path) -> None:
    built = read(tmp_path, extractor_base={"id": "sha256:jit"})
    assert built.provenance("trainer") == {
        "name": "cleanslate-trainer:1.2.3", "id": "sha256:t", "base": "sha256:base",
        "inputs": {"VERSION": "bb"},
    }  # fmt: skip
    assert built.provenance("extractor")["base"] == "sha256:jit"
    assert built.provenance("extractor")["name"] == "cleanslate-extractor:1.2.3-cpu"
    assert built.commit == "c0ffee"


def test_images_of_a_changed_tree_say_so(tmp_path: Path) -> None:
    assert read(tmp_path, dirty=True).commit == "c0ffee+changes"


@pytest.mark.parametrize(
    "changes", [{"images": None}, {"images": {"trainer": {}}}, {"base": None}, {"images": [1]}]
)
def test_another_shape_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ContainerError, match="make images"):
        read(tmp_path, **changes)


def test_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="make images"):
        BuiltImages.read(tmp_path / "images.json")


def package(folder: Path) -> Path:
    (folder / "room").mkdir(parents=True)
    (folder / "room" / "a.py").write_text("A = 1\n")
    (folder / "tiny.yaml").write_text("run: {}\n")
    return folder


def test_equal_code_is_accepted_whatever_was_compiled(tmp_path: Path) -> None:
    tree, installed = package(tmp_path / "tree"), package(tmp_path / "installed")
    (tree / "room" / "__pycache__").mkdir()
    (tree / "room" / "__pycache__" / "a.pyc").write_bytes(b"x")
    check_same_code(tree, installed)


@pytest.mark.parametrize("name", ["room/a.py", "tiny.yaml", "room/new.py"])
def test_other_code_is_refused_and_named(tmp_path: Path, name: str) -> None:
    tree, installed = package(tmp_path / "tree"), package(tmp_path / "installed")
    (tree / name).write_text("# changed\n")
    with pytest.raises(ContainerError, match=f"1 files.*{name}") as caught:
        check_same_code(tree, installed)
    assert caught.value.next_step == "make images"
