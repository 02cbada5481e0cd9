import json
from collections.abc import Callable

import pytest

from pipeline.host.docker import Engine, parse_info, read_docker
from pipeline.host.reader import Missing, Output, Reader

INFO = json.dumps(
    {"ServerVersion": "20.10.24", "Runtimes": {"runc": {"path": "runc"}, "nvidia": {"path": "n"}}}
)
REFUSED = "permission denied while trying to connect to the Docker daemon socket"


def test_an_engine_tells_its_version_and_runtimes(simulated: str) -> None:
    assert parse_info(INFO) == Engine("20.10.24", ("nvidia", "runc"))


@pytest.mark.parametrize(
    "text",
    [
        '{"ServerErrors": ["Cannot connect"], "ServerVersion": "1"}',
        '{"ServerErrors": ["x"]}',
        '{"ID": ""}',
        "",
        "no JSON",
    ],
)
def test_a_client_without_an_engine_is_no_engine(simulated: str, text: str) -> None:
    assert isinstance(parse_info(text), Missing)


@pytest.mark.parametrize(
    ("said", "denied", "reason"),
    [
        (Output(1, "", f"ERROR: {REFUSED}"), True, REFUSED),
        (Output(0, json.dumps({"ServerErrors": [REFUSED]})), True, REFUSED),
        (Missing("docker did not answer in 15 s", hung=True), False, "did not answer"),
        (Missing("docker: No such file or directory"), False, "docker: No such file"),
    ],
)
def test_why_there_is_no_engine(
    recorded: Callable[..., Reader], said: Output | Missing, denied: bool, reason: str
) -> None:
    facts = read_docker(recorded(said={"docker info": said}))
    assert isinstance(facts.engine, Missing)
    assert reason in facts.engine.reason
    assert facts.denied is denied


def test_toolkit_and_daemon_file(recorded: Callable[..., Reader]) -> None:
    said = {"docker info": INFO, "nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.18.1\n"
            "commit: abc123\n"}  # fmt: skip
    facts = read_docker(recorded({"/etc/docker/daemon.json": '{"log-driver": "json-file"}'}, said))
    assert facts.toolkit == "1.18.1"
    assert facts.daemon == {"log-driver": "json-file"}


def test_a_toolkit_that_is_there_and_says_nothing_is_there(recorded: Callable[..., Reader]) -> None:
    assert read_docker(recorded(said={"nvidia-ctk": "?"})).toolkit == "unknown"
    broken = read_docker(recorded(said={"nvidia-ctk": Output(1, "", "no library")})).toolkit
    assert broken == Missing("nvidia-ctk: no library")


def test_a_broken_daemon_file_is_missing_with_the_reason(recorded: Callable[..., Reader]) -> None:
    facts = read_docker(recorded({"/etc/docker/daemon.json": "{,}"}))
    assert isinstance(facts.daemon, Missing)
    assert "is no JSON" in facts.daemon.reason
