"""The front: what a person sees, and what it hands over to."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli

ROOT = Path(__file__).parent.parent


def test_a_ctrl_c_is_said_and_has_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli._guard(lambda: 130)
    assert ended.value.code == 130
    assert "RESUME=1" in capsys.readouterr().err


def test_a_profile_of_containers_goes_to_the_launcher(tmp_path: Path) -> None:
    profile = tmp_path / "boxed.yaml"
    profile.write_text("extends: tiny\nrun: {runtime: docker}\n")
    (tmp_path / "bash").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bash").chmod(0o755)
    arguments = ("train", "--profile", str(profile), "--set", "train.epochs=3", "--resume")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [str(ROOT / "docker" / "run.sh"), *arguments], done.stderr


def test_in_a_container_it_is_not_handed_over_again(tmp_path: Path) -> None:
    profile = tmp_path / "boxed.yaml"
    profile.write_text(f"extends: tiny\nrun: {{runtime: docker, root: {tmp_path}}}\n")
    facts = tmp_path / "images.json"
    facts.write_text(
        '{"version": "1", "commit": "c0ffee", "dirty": true, "base": {"id": "sha256:b"},'
        ' "images": {"trainer": {"id": "sha256:t"}}, "inputs": {"VERSION": "aa"}}'
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pipeline.cli", "target", "--profile", str(profile)),
            *("--image-facts", str(facts), "--container", "box-1"),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = cli.Manifest.read(tmp_path / "boxed" / "target")
    assert manifest.provenance["image"] == {
        "name": "cleanslate-trainer:1", "id": "sha256:t", "base": "sha256:b",
        "inputs": {"VERSION": "aa"},
    }  # fmt: skip
    assert manifest.provenance["commit"] == "c0ffee+changes"
    assert '"container": "box-1"' in (tmp_path / "boxed" / ".lock").read_text()
