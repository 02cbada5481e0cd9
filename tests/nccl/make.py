"""Rows and cases made by hand, and a look at processes that a sweep started."""

import time
from collections.abc import Mapping

import psutil

from pipeline.nccl.attempt import Status
from pipeline.nccl.cases import Case
from pipeline.nccl.plan import Grid
from pipeline.nccl.rows import Measured, Row

SMALL = (
    Case("extraction", "all_reduce", "bfloat16", 1024, 1, batch=2, samples=3),
    Case("training", "reduce_scatter", "float32", 4096, 1, batch=1, samples=3),
)
ONE_PROTOCOL = Grid(
    protocols=("LL",),
    algorithms=(),
    peer_levels=(),
    least_channels=(),
    most_channels={},
    buffer_bytes={},
)


def row(
    environment: Mapping[str, str],
    seconds: float = 1.0,
    *,
    launch: int = 0,
    spread: float = 0.02,
    status: Status = "ok",
    use: str = "extraction",
) -> Row:
    """One launch that took so long for its only message."""
    case = Measured("all", 1.0, seconds, seconds, spread, 1e9, 20)
    code = None if status == "ok" else f"CODE-{status}"
    detail = "" if status == "ok" else f"it {status}"
    return Row(use, dict(environment), launch, status, code, detail, 1.0, (case,))


def twice(environment: Mapping[str, str], first: float, second: float) -> list[Row]:
    """Both launches of an environment."""
    return [row(environment, first), row(environment, second, launch=1)]


def wait_for_ranks(pid: int) -> list[psutil.Process]:
    """Both workers that a process has started, as soon as they are connected to each other."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        children = psutil.Process(pid).children()
        found = [child for child in children if _connected(child)]
        if len(found) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def _connected(process: psutil.Process) -> bool:
    try:
        return any(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections())
    except psutil.NoSuchProcess:
        return False


def wait_for_ends(processes: list[psutil.Process]) -> None:
    """All of them end by themselves."""
    _, left = psutil.wait_procs(processes, timeout=20)
    assert left == []
