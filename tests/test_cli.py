"""The front: what a person sees, and what it hands over to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.host.wanted import Wanted
from pipeline.slate.door import guard
from pipeline.slate.manifest import Manifest

ROOT = Path(__file__).parent.parent
PREFLIGHT = (sys.executable, "-m", "pipeline.cli", "preflight")


def test_a_ctrl_c_is_said_and_has_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        guard(lambda: 130)
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


def test_preflight_tells_people_and_machines_what_is_missing_and_ends_with_3(
    tmp_path: Path,
) -> None:
    names = [name for name in Wanted.model_fields if name != "states_tmpfs"]
    size = f"{{path: {tmp_path}/absent, bytes: 1048576}}"
    lines = [f"  states_tmpfs: {size}", *(f"  {name}: null" for name in names)]
    (tmp_path / "host.yml").write_text("\n".join(["ready_host:", *lines]))
    command = (*PREFLIGHT, "--host", str(tmp_path / "host.yml"))
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 3, told.stderr
    first, *_, last = told.stdout.splitlines()
    assert first == f"HOST-TMPFS-MISSING  {tmp_path}/absent: nothing is mounted there"
    assert last == "not ready: 1 found"
    done = subprocess.run(
        (*command, "--json"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert set(json.loads(done.stdout)) == {"ready", "findings", "skipped", "facts"}
    train = (*command, "--stage", "train", "--profile", "tiny")
    narrow = subprocess.run(train, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (narrow.returncode, narrow.stdout) == (0, "ready\n"), narrow.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--stage", "bake", "--host", "x"), "no stage bake"), ((), "--host"),
     (("--host", "/nowhere.yml"), "/nowhere.yml")],
)  # fmt: skip
def test_preflight_refuses_what_it_cannot_do(arguments: tuple[str, ...], said: str) -> None:
    command = (*PREFLIGHT, *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr


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
    manifest = Manifest.read(tmp_path / "boxed" / "target")
    assert manifest.provenance["image"] == {
        "name": "cleanslate-trainer:1", "id": "sha256:t", "base": "sha256:b",
        "inputs": {"VERSION": "aa"},
    }  # fmt: skip
    assert manifest.provenance["commit"] == "c0ffee+changes"
    assert '"container": "box-1"' in (tmp_path / "boxed" / ".lock").read_text()
