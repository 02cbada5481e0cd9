"""Docker's engine, its one file of settings, and NVIDIA's part in it."""

import json
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from pipeline.host.wanted import Wanted, WantedContainers
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state
VERSION = (Path(__file__).parents[2] / "VERSION").read_text(encoding="utf-8").strip()
SETTINGS = "/etc/docker/daemon.json"
# Not nvidia-smi: it answers where cuInit fails (container-toolkit#1967).
_CU_INIT = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))"


@pytest.fixture
def asked(wanted: Wanted) -> WantedContainers:
    if wanted.containers is None:
        pytest.skip("containers: not wanted")
    return wanted.containers


def test_the_engine_answers(host: Host, asked: WantedContainers) -> None:
    done = host.run("docker version --format '{{.Server.Version}}'")
    if done.rc != 0:
        refuse(
            "HOST-DOCKER-ENGINE",
            (done.stderr.strip() or "docker does not answer").splitlines()[-1],
            wanted="an engine that answers this user",
            next_step="systemctl status docker; " + by_role("container_runtime"),
        )


def test_the_engine_starts_at_boot(host: Host, asked: WantedContainers) -> None:
    state = host.run("systemctl is-enabled docker.service").stdout.strip()
    if state != "enabled":
        refuse(
            "HOST-DOCKER-ENGINE",
            f"docker.service is {state or 'not there'}",
            wanted="enabled",
            next_step=by_role("container_runtime"),
        )


def test_the_settings_are_ours_alone(host: Host, asked: WantedContainers) -> None:
    if asked.daemon is None:
        pytest.skip("containers.daemon: not wanted")
    file = host.file(SETTINGS)
    if not file.exists:
        _refuse(f"no {SETTINGS}", asked.daemon)
    try:
        found = json.loads(file.content_string)
    except ValueError as error:
        found = f"no JSON ({error})"
    if found != asked.daemon:
        _refuse(f"{SETTINGS} is {_short(found)}", asked.daemon)


def test_the_engine_runs_with_the_settings(host: Host, asked: WantedContainers) -> None:
    """A file that was written and not read yet changes nothing."""
    if asked.daemon is None:
        pytest.skip("containers.daemon: not wanted")
    done = host.run("docker info --format '{{json .}}'")
    if done.rc != 0:
        pytest.skip("docker does not answer: another test says so")
    live = json.loads(done.stdout)
    missing = set(asked.daemon.get("runtimes", {})) - set(live["Runtimes"])
    driver = asked.daemon.get("log-driver", live["LoggingDriver"])
    if missing or driver != live["LoggingDriver"]:
        _refuse(
            f"the engine runs with runtimes {', '.join(sorted(live['Runtimes']))} and "
            f"log-driver {live['LoggingDriver']}",
            asked.daemon,
        )


def test_the_nvidia_runtime_is_there(host: Host, asked: WantedContainers) -> None:
    for runtime in (asked.daemon or {}).get("runtimes", {}).values():
        if not host.exists(runtime["path"]):
            refuse(
                "HOST-DOCKER-TOOLKIT",
                f"no {runtime['path']}",
                wanted="the runtime that daemon.json names",
                next_step=by_role("container_runtime"),
            )


@pytest.mark.usefixtures("cards")
def test_cuda_starts_in_a_container(host: Host, asked: WantedContainers) -> None:
    image = f"cleanslate-trainer:{VERSION}"
    if host.run("docker image inspect %s", image).rc != 0:
        pytest.skip(f"no image {image} on this host: make images, then again")
    done = host.run(
        "docker run --rm --network none --gpus all --entrypoint python %s -c %s", image, _CU_INIT
    )
    if done.rc != 0:
        refuse(
            "HOST-DOCKER-TOOLKIT",
            f"cuInit in a container ends with {done.rc}: {done.stderr.strip()[-200:]}",
            wanted="0",
            next_step="nvidia-ctk --version; " + by_role("container_runtime"),
        )


def _short(value: Any) -> str:
    return json.dumps(value, sort_keys=True)[:300]


def _refuse(found: str, wanted: dict[str, Any]) -> None:
    refuse(
        "HOST-DOCKER-DAEMON",
        found,
        wanted=_short(wanted),
        next_step="stop the containers, then: " + by_role("container_runtime"),
    )
