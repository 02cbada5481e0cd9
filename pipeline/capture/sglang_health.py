"""Whether the SGLang server of this container answers: `python -m pipeline.capture.sglang_health`.

The HEALTHCHECK of the extractor's image. Status 0 when each server that runs here answers well,
when one still loads, and when there is none: the stage has not come to it yet. Status 1 when one
listens and does not answer well. How long a server may load is the stage's business
(extract.server.startup_timeout_seconds): Docker's start period ends with the first success, which
a container has before its server starts.
"""

import http.client
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import psutil

from pipeline.capture import sglang_launch

# SGLang 0.5.23 waits 20 s for its own ranks (HEALTH_CHECK_TIMEOUT) before it answers 503.
_TIMEOUT_SECONDS = 25.0


def server_port(command: Sequence[str]) -> int | None:
    """The port in the command line of a server that `sglang_launch` runs; None for any other."""
    if sglang_launch.__name__ not in command:
        return None
    port = dict(pairwise(command)).get("--port", "")  # the last one counts, as for argparse
    return int(port) if port.isdecimal() else None


def running_servers() -> Iterator[tuple[int, int]]:
    """(pid, port) of each server process that this one can see."""
    for process in psutil.process_iter(["cmdline"]):
        port = server_port(process.info["cmdline"] or [])
        if port is not None:
            yield process.pid, port


def ask(port: int, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> tuple[bool, str]:
    """Whether what listens on that loopback port is well, and how that shows."""
    # SGLang asks for no key here. It runs one token through the model when it is idle.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except ConnectionRefusedError:
        return True, "still loads"
    except (OSError, http.client.HTTPException) as error:
        return False, f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return status == http.client.OK, f"/health gave {status}"


def report(servers: Iterable[tuple[int, int]]) -> int:
    """Prints a line for each (pid, port) and gives the exit status."""
    found = [(pid, port, *ask(port)) for pid, port in servers]
    lines = [f"server of pid {pid}, port {port}: {how}" for pid, port, _, how in found]
    print("\n".join(lines) or "no server")  # noqa: T201  Docker keeps what it says
    return 0 if all(well for _, _, well, _ in found) else 1


if __name__ == "__main__":
    sys.exit(report(running_servers()))
