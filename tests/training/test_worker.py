import json
import subprocess
import sys
from pathlib import Path


def work(*arguments: str) -> tuple[int, list[dict[str, str]], str]:
    command = [sys.executable, "-m", "pipeline.training.worker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_run_ends_with_done_and_prints_nothing_else(ask, tmp_path: Path):
    file = tmp_path / "request.json"
    file.write_text(json.dumps(ask(epochs=1, warmup_share=0.0).to_json()))
    status, events, _ = work(str(file))
    assert status == 0
    assert events[0]["event"] == "plan"
    assert events[-1]["event"] == "done"


def test_a_fault_comes_in_its_three_parts(ask, tmp_path: Path):
    file = tmp_path / "request.json"
    file.write_text(json.dumps({**ask().to_json(), "dataset": str(tmp_path / "missing")}))
    status, events, log = work(str(file))
    assert status == 1
    assert events[-1]["event"] == "error"
    assert "missing" in events[-1]["message"]
    assert events[-1]["next_step"]
    assert "Traceback" in log


def test_a_call_without_a_request_is_refused():
    status, events, _ = work()
    assert status == 1
    assert events[-1]["kind"] == "RequestError"
