"""The life of a server, with a stand-in for SGLang: real processes, sockets, signals."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pipeline.capture.errors import CaptureError, ServerDied
from pipeline.capture.sglang_server import SglangServer
from pipeline.settings.environment import child_environment
from tests.processes import alive, await_ends, below

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def make(
    folder: Path, *, start: str | None = None, timeout: float = 20.0, say: Any = None
) -> SglangServer:
    script = folder / "script.json"
    told = {"prefix": "cs-", "staging": str(folder), "start": start, "replies": {}}
    script.write_text(json.dumps(told))
    path = f"{ROOT}:{HERE / 'stand_in_server'}"
    return SglangServer(
        ["--script", str(script)],
        python=Path(sys.executable),
        environment=child_environment({"PYTHONPATH": path}),
        log=folder / "server.log",
        startup_timeout_seconds=timeout,
        say=say or (lambda _line: None),
    )


def family(server: SglangServer) -> list[int]:
    return [server.pid, *(one.pid for one in below(server.pid))]


def test_a_started_server_answers_to_its_key_alone(tmp_path: Path) -> None:
    with make(tmp_path) as server:
        assert server.server_info()["version"] == "0.5.23"
        assert server.url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{server.url}/server_info", trust_env=False).status_code == 401
        server.check()


def test_the_key_is_in_no_command_line(tmp_path: Path) -> None:
    with make(tmp_path) as server:
        for pid in family(server):
            assert server.key not in " ".join(psutil.Process(pid).cmdline())
            assert server.key not in psutil.Process(pid).environ().values()


def test_leaving_the_context_leaves_no_process(tmp_path: Path) -> None:
    with make(tmp_path) as server:
        pids = family(server)
        assert len(pids) == 2
    assert alive(pids) == []


def test_a_server_that_ignores_the_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.capture.sglang_server._TERMINATE_SECONDS", 0.5)
    with make(tmp_path, start="deaf") as server:
        pids = family(server)
    assert alive(pids) == []


def test_a_death_while_loading_shows_the_first_rank_s_traceback(tmp_path: Path) -> None:
    with pytest.raises(ServerDied) as caught, make(tmp_path, start="raise"):
        pass
    assert "ended with status 1" in caught.value.found
    assert "ValueError: bad weights" in caught.value.found
    assert "EOFError" not in caught.value.found


def test_a_server_that_is_never_ready_is_given_up_and_stopped(tmp_path: Path) -> None:
    began = time.monotonic()
    server = make(tmp_path, start="never", timeout=5.0)  # time to say something on any machine
    with pytest.raises(CaptureError, match=r"not ready after 5 s.*loading weights"), server:
        pass
    assert time.monotonic() - began < 30
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in _command(one)]


def _command(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or [])


class Heard(Exception):
    """What was waited for has been said."""


def test_the_log_s_last_line_is_said_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.capture.sglang_server._SAY_SECONDS", 0.2)

    def say(line: str) -> None:
        if line.endswith("loading weights"):
            raise Heard

    with pytest.raises(Heard), make(tmp_path, start="never", timeout=60.0, say=say):
        pass


def test_another_port_is_tried_when_one_is_taken(tmp_path: Path) -> None:
    said: list[str] = []
    with make(tmp_path, start="port_taken_once", say=said.append) as server:
        assert server.server_info()
    assert any("trying another" in line for line in said)


@pytest.mark.parametrize(
    ("victim", "says"),
    [(lambda pids: pids[0], "was killed by SIGKILL"), (lambda pids: pids[1], "scheduler_TP0")],
    ids=["server", "rank"],
)
def test_a_killed_process_is_noticed_at_once(
    tmp_path: Path, victim: Callable[[list[int]], int], says: str
) -> None:
    with make(tmp_path) as server:
        killed = victim(family(server))
        os.kill(killed, signal.SIGKILL)
        await_ends([killed], within=5.0)
        with pytest.raises(ServerDied, match=says):
            server.check()


def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
import test_sglang_server as tests
with tests.make(Path({str(tmp_path)!r})) as server:
    print(*tests.family(server), flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    pids = [int(one) for one in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await_ends(pids[:1], within=5.0)
    # The stand-in's rank is not SGLang's, which watches its parent itself.
    for pid in pids[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    server = SglangServer(
        [],
        python=tmp_path / "python",
        environment={},
        log=tmp_path / "log",
        startup_timeout_seconds=1,
        say=print,
    )
    with pytest.raises(CaptureError, match="No such file"), server:
        pass
