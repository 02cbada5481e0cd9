"""The tiny run on the real server by its public commands: answers, evaluation, serving."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pipeline.slate.manifest import Manifest
from tests.processes import below

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.sglang


class Run:
    """The tiny-sglang profile, its states by transformers: capturing is another test's business."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "tiny-sglang"

    def arguments(self, command: str, *more: str) -> list[str]:
        return [
            *(sys.executable, "-m", "pipeline.cli", command, "--profile", "tiny-sglang"),
            *("--set", f"run.root={self.root}", "--set", "extract.engine=transformers"),
            *("--set", f"extract.staging={self.root / 'staging'}", *more),
        ]

    def __call__(self, command: str, *more: str) -> str:
        done = subprocess.run(
            self.arguments(command, *more), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Everything up to the export, by transformers."""
    made = Run(tmp_path_factory.mktemp("runs"))
    made("export")
    return made


def test_the_server_agrees_with_the_loop_and_answers_the_same_with_and_without_the_drafter(
    run: Run,
) -> None:
    said = run("evaluate", "--engine", "sglang")
    manifest = Manifest.read(run.folder / "evaluate")
    both = manifest.provenance["measured"]["agreement"]
    assert both["relative"] <= 0.02
    assert both["same_answers"] == both["prompts"] == manifest.counts["prompts"]
    assert manifest.counts["identical"] == manifest.counts["prompts"]
    assert manifest.settings["engine"] == "sglang"
    flags = manifest.provenance["measured"]["servers"]
    assert flags["drafted"]["flags"]["speculative_algorithm"] == "EAGLE3"
    assert flags["plain"]["flags"]["speculative_algorithm"] is None
    assert "by the server" in said
    run("report", "--engine", "sglang")


def test_answers_by_the_server_are_those_by_transformers(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path)
    other("prepare", "--engine", "sglang")
    assert Manifest.read(other.folder / "prepare").settings["answering"]["engine"] == "sglang"

    def answers(one: Run) -> dict[str, tuple[list[int], list[int], str]]:
        lines = (one.folder / "prepare" / "answers.jsonl").read_text("utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        return {a["id"]: (a["prompt_ids"], a["answer_ids"], a["finish_reason"]) for a in found}

    assert answers(other) == answers(run)
    for name in ("counts", "facts"):
        wanted = getattr(Manifest.read(run.folder / "prepare"), name)
        assert getattr(Manifest.read(other.folder / "prepare"), name) == wanted
    samples = "samples-00000.safetensors"
    assert (other.folder / "prepare" / samples).read_bytes() == (
        run.folder / "prepare" / samples
    ).read_bytes()


@pytest.fixture
def serving(run: Run, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    said = tmp_path / "said"
    with said.open("w") as output:
        process = subprocess.Popen(
            run.arguments("serve"), cwd=ROOT, stdout=output, stderr=output, text=True
        )
    try:
        deadline = time.monotonic() + 300
        while "Ctrl-C stops it" not in said.read_text():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.5)
        yield process, said
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_serve_answers_who_has_the_key_and_stops_in_order(
    run: Run, serving: tuple[subprocess.Popen[str], Path], ending: signal.Signals
) -> None:
    process, said = serving
    text = said.read_text()
    key_file = run.folder / "serve.key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    key = key_file.read_text().strip()
    assert key not in text
    # The printed command is one that a shell takes, and that gets an answer.
    command = text[text.index("  curl ") : text.index("serve: Ctrl-C stops it")]
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120
    )
    reply = json.loads(done.stdout)
    assert reply["model"] == "tiny-sglang"
    assert reply["usage"]["completion_tokens"] > 0
    url = re.search(r"http://127\.0\.0\.1:\d+", text)
    assert url is not None
    assert httpx.get(f"{url[0]}/v1/models", trust_env=False).status_code == 401
    for log in (run.folder / "logs").glob("*serve*-server.log"):
        assert log.stat().st_mode & 0o777 == 0o600
    children = below(process.pid)
    assert len(children) >= 2
    process.send_signal(ending)
    assert process.wait(timeout=60) == 0
    assert "serve: stopped in order" in said.read_text()
    assert not key_file.exists()
    assert not [child for child in children if child.is_running()]
