"""`docker/images.sh` against a docker that only notes what it is asked."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = """#!/usr/bin/env bash
case "$1" in
  image) echo "$*" >>"$NOTES.image"
    case "$4" in *Size*) echo 1000000 ;; *) echo "sha256:${6//[^a-z]/}" ;; esac ;;
  run) case "${@: -1}" in *torch*) echo cpu ;; *) exit "${PYTHON_IS:-0}" ;; esac ;;
  build) ls -R docker/inputs >>"$NOTES"; echo "$*" >>"$NOTES"; eval "${BUILD_DOES:-}" ;;
esac
"""
BASE = f"python@sha256:{'a' * 64}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the script reads of the repository, and a stand-in for docker."""
    root = tmp_path / "tree"
    for name in ("Dockerfile", ".dockerignore", "VERSION", "pyproject.toml", "docker"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=lambda at, _: ["wheels", "ca.pem"])
        else:
            root.mkdir(exist_ok=True)
            shutil.copy(source, root / name)
    (root / "pipeline").mkdir()
    (root / "pipeline" / "cli.py").write_text("print(1)\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(DOCKER)
    (tmp_path / "bin" / "docker").chmod(0o755)
    return root


def images(tree: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "GIT_DIR"}  # noqa: TID251
    path = f"{tree.parent / 'bin'}:{inherited['PATH']}"
    return subprocess.run(
        ["bash", str(tree / "docker/images.sh"), "--variant", "cpu", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, "PATH": path, "NOTES": str(tree.parent / "notes"), **environment},
    )


def left_in_inputs(tree: Path) -> list[str]:
    return sorted(path.name for path in (tree / "docker/inputs").iterdir())


def test_the_record_names_base_images_and_inputs(tree: Path) -> None:
    assert (done := images(tree, "--base", BASE)).returncode == 0, done.stderr
    record = json.loads((tree / "images/images.json").read_text())
    assert record["base"]["given"] == BASE
    assert {name: one["variant"] for name, one in record["images"].items()} == {
        "trainer": "cpu",
        "extractor": "cpu",
    }
    wanted = {
        "Dockerfile",
        "pipeline",
        "docker/extractor/requirements-cpu.txt",
        "docker/base/build.sh",
    }
    assert wanted <= record["inputs"].keys()


def test_only_build_stages_of_ours_older_than_a_day_are_removed(tree: Path) -> None:
    images(tree, "--base", BASE)
    asked = (tree.parent / "notes.image").read_text().splitlines()
    wanted = "image prune --force --filter label=cleanslate.build --filter until=24h"
    assert [line for line in asked if "inspect" not in line] == [wanted]
    assert (ROOT / "Dockerfile").read_text().count("\nLABEL cleanslate.build=") == 2


def test_a_changed_line_of_the_package_changes_the_record(tree: Path) -> None:
    digests = []
    for text in ("print(1)\n", "print(2)\n"):
        (tree / "pipeline/cli.py").write_text(text)
        images(tree, "--base", BASE)
        digests.append(json.loads((tree / "images/images.json").read_text())["inputs"]["pipeline"])
    assert digests[0] != digests[1]


def test_only_wheels_that_a_lock_wants_are_lent_to_the_build(tree: Path, tmp_path: Path) -> None:
    (wheels := tmp_path / "lent").mkdir()
    names = [
        "torch-2.13.0+cpu-cp311-none-any.whl",
        "Torch-9.9-py3-none-any.whl",
        "x-1-py3-none-any.whl",
    ]
    for name in names:
        (wheels / name).touch()
    (ca := tmp_path / "bundle.pem").write_text("certificates")
    assert images(tree, "--base", BASE, "--wheels", str(wheels), "--ca", str(ca)).returncode == 0
    seen = (tmp_path / "notes").read_text()
    assert [name in seen for name in (*names, "ca.pem")] == [True, False, False, True]
    assert left_in_inputs(tree) == ["README.md"]


def test_a_build_that_fails_leaves_no_input_and_no_record(tree: Path, tmp_path: Path) -> None:
    (ca := tmp_path / "bundle.pem").write_text("certificates")
    done = images(tree, "--base", BASE, "--ca", str(ca), BUILD_DOES="exit 3")
    assert done.returncode == 1
    assert "trainer was not built" in done.stderr
    assert left_in_inputs(tree) == ["README.md"]
    assert not (tree / "images/images.json").exists()


def test_files_that_change_during_the_build_leave_no_record(tree: Path) -> None:
    done = images(tree, "--base", BASE, BUILD_DOES="echo >>pipeline/cli.py")
    assert "files changed while the images were built" in done.stderr
    assert not (tree / "images/images.json").exists()


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--base", "python:3.11"], {}, "names no digest"),
        (["--base", BASE], {"PYTHON_IS": "1"}, "no python3 of 3.11"),
        (["--variant", "rocm"], {}, "VARIANT=rocm"),
        (["--ca", "/absent.pem"], {}, "no file /absent.pem"),
        (["--wheels", "/absent"], {}, "no folder /absent"),
    ],
)
def test_what_cannot_be_built_from_is_refused(
    tree: Path, options: list[str], environment: dict[str, str], said: str
) -> None:
    done = images(tree, *options, **environment)
    assert done.returncode == 1
    assert said in done.stderr
    assert "wanted:" in done.stderr
    assert "next:" in done.stderr


def test_a_folder_of_somebody_else_is_not_written_into(tree: Path) -> None:
    (tree / "images").mkdir()
    done = images(tree, "--base", BASE)
    assert "without the mark" in done.stderr
    assert list((tree / "images").iterdir()) == []
