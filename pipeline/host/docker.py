"""The Docker engine: does it answer, which runtimes it has, and its one file."""

import re
from dataclasses import dataclass
from typing import Any

from pipeline.host.reader import Missing, Reader
from pipeline.settings.strict_json import parse_json

DAEMON_FILE = "/etc/docker/daemon.json"


@dataclass(frozen=True)
class Engine:
    """What a running engine says of itself."""

    version: str
    runtimes: tuple[str, ...]


@dataclass(frozen=True)
class DockerFacts:
    """engine: Missing where there is none, or none that answers this user.

    denied: it may well run, but this user may not ask it. toolkit: version of the NVIDIA toolkit.
    daemon: the value of its file; invalid JSON is a Missing like an absent file.
    """

    engine: Engine | Missing
    denied: bool
    toolkit: str | Missing
    daemon: Any | Missing


def read_docker(reader: Reader) -> DockerFacts:
    """Each fact on its own."""
    output = reader.command("docker", "info", "--format", "{{json .}}", seconds=15.0)
    engine: Engine | Missing
    denied = False
    if isinstance(output, Missing):
        engine = output
    else:
        denied = "permission denied" in output.error + output.text
        engine = parse_info(output.text)
        if isinstance(engine, Missing) and output.error.strip():
            engine = Missing(output.last_error)
    cli = reader.command("nvidia-ctk", "--version")
    toolkit: str | Missing
    if isinstance(cli, Missing):
        toolkit = cli
    elif cli.status != 0:
        toolkit = Missing(f"nvidia-ctk: {cli.last_error}")
    else:
        version = re.search(r"version (\S+)", cli.text)
        toolkit = version[1] if version else "unknown"
    text = reader.text(DAEMON_FILE)
    return DockerFacts(
        engine, denied, toolkit, text if isinstance(text, Missing) else parse_daemon(text)
    )


def parse_info(text: str) -> Engine | Missing:
    """From `docker info --format '{{json .}}'`, which ends with 0 when no engine answers, too."""
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return Missing(f"docker info gave no JSON object: {text.strip()[:80]!r}")
    if errors := value.get("ServerErrors"):
        return Missing(str(errors[0] if isinstance(errors, list) else errors))
    version, runtimes = value.get("ServerVersion"), value.get("Runtimes")
    if not isinstance(version, str) or not version:
        return Missing("docker info names no engine")
    return Engine(version, tuple(sorted(runtimes)) if isinstance(runtimes, dict) else ())


def parse_daemon(text: str) -> Any | Missing:
    """The value of daemon.json."""
    try:
        return parse_json(text)
    except ValueError as error:
        return Missing(f"{DAEMON_FILE} is no JSON: {error}")
