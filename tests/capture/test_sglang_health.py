"""The extractor's health check against real loopback servers and the stand-in's process."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pipeline.capture.sglang_health import ask, report, running_servers, server_port
from pipeline.capture.sglang_server import SglangServer, free_port
from pipeline.settings.environment import child_environment

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A port on which /health answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[SglangServer]:
    script = tmp_path / "script.json"
    told = {"prefix": "cs-", "staging": str(tmp_path), "start": None, "replies": {}}
    script.write_text(json.dumps(told))
    with SglangServer(
        ["--script", str(script)],
        python=Path(sys.executable),
        environment=child_environment({"PYTHONPATH": f"{ROOT}:{HERE / 'stand_in_server'}"}),
        log=tmp_path / "server.log",
        startup_timeout_seconds=20,
        say=lambda _line: None,
    ) as server:
        yield server


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("python -m pipeline.capture.sglang_launch 7 --host 127.0.0.1 --port 30001", 30001),
        ("python -m pipeline.capture.sglang_launch 7 --port 1 --port 30001", 30001),
        ("python -m sglang.launch_server --port 30001", None),
        ("python -m pipeline.capture.sglang_launch 7 --port", None),
        ("vim pipeline.capture.sglang_launch.py --port 30001", None),
        ("", None),
    ],
)
def test_a_server_is_known_by_its_command_line(command: str, port: int | None) -> None:
    assert server_port(command.split()) == port


def test_a_container_without_a_server_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([]) == 0
    assert capsys.readouterr().out == "no server\n"


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1), (500, 1)])
def test_a_server_is_as_well_as_it_says(
    status: int, exit_status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status) as port:
        assert report([(7, port)]) == exit_status
    assert f"server of pid 7, port {port}: /health gave {status}" in capsys.readouterr().out


def test_a_server_that_does_not_listen_yet_still_loads() -> None:
    assert ask(free_port()) == (True, "still loads")


def test_a_server_that_listens_and_says_nothing_is_not_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        well, how = ask(silent.getsockname()[1], timeout_seconds=0.2)
    assert not well
    assert "timed out" in how


def test_one_server_that_is_not_well_is_enough() -> None:
    with answering(200) as good, answering(503) as bad:
        assert report([(7, good), (8, bad)]) == 1


def test_the_server_of_a_stage_is_found_and_asked(stand_in: SglangServer) -> None:
    port = int(stand_in.url.rpartition(":")[2])
    assert (stand_in.pid, port) in list(running_servers())
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.capture.sglang_health"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"server of pid {stand_in.pid}, port {port}: /health gave 200" in done.stdout
