"""Runs tests/host against this machine, with values and programs that a test chose."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
READY_HOST = ROOT / "ansible" / "group_vars" / "gpu_hosts.yml"


@dataclass(frozen=True)
class Answer:
    rc: int
    output: str

    @property
    def codes(self) -> list[str]:
        """The code that each failure begins with, in their order."""
        lines = self.output.splitlines()
        return [line.partition(":")[0] for line in lines if line.startswith("HOST-")]


def ready_host(**changed: Any) -> dict[str, Any]:
    """ready_host of the repository with the given parts, and nothing else wanted."""
    value = yaml.safe_load(READY_HOST.read_text(encoding="utf-8"))["ready_host"]
    assert changed.keys() <= value.keys()
    return dict.fromkeys(value) | changed


def of_repository(part: str) -> Any:
    """One part of ready_host as the repository has it."""
    return yaml.safe_load(READY_HOST.read_text(encoding="utf-8"))["ready_host"][part]


def programs(folder: Path, **texts: str) -> Path:
    """A folder of programs that print what is given. `name=text`, or `#!...` for a whole script."""
    folder.mkdir()
    for name, text in texts.items():
        path = folder / name.replace("_", "-")
        script = f"#!/bin/sh\nprintf '%s' {shlex.quote(text)}\n"
        path.write_text(text if text.startswith("#!") else script)
        path.chmod(0o755)
    return folder


def ask(
    folder: Path, wanted: dict[str, Any], *options: str, first_in_path: Path | None = None
) -> Answer:
    """What tests/host says of this machine. options: of pytest, files among them."""
    (file := folder / "wanted.yml").write_text(yaml.safe_dump({"ready_host": wanted}))
    environment = {**os.environ, "COLUMNS": "200"}  # noqa: TID251
    if first_in_path is not None:
        environment["PATH"] = f"{first_in_path}:{environment['PATH']}"
    files = [one for one in options if one.startswith("tests/")] or ["tests/host"]
    rest = [one for one in options if not one.startswith("tests/")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *rest]
    done = subprocess.run(
        [*command, "--hosts=local://", f"--host-wanted={file}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return Answer(done.returncode, done.stdout + done.stderr)
