"""GPUs as NVML sees them, read in a process of its own so that a hung driver is a result.

Run as a module it prints the facts as JSON; `read_gpus` starts it with a time limit.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from pipeline.host.reader import kill

_MIB = 1 << 20
_COMMAND = (sys.executable, "-m", "pipeline.host.gpus")
_NOT_SUPPORTED, _MISMATCH = 3, 18  # NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_LIB_RM_VERSION_MISMATCH
_ALL_BITS = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE, what a process uses where it may not be told


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU. command is empty when its pid is not visible here.

    orphan: its parent is PID 1 or a session's systemd, as with workers whose launcher died.
    """

    pid: int
    used_mib: int
    command: str
    orphan: bool = False


@dataclass(frozen=True)
class Gpu:
    """One GPU: used_mib leaves out what the driver reserves for itself (NVML memory info v2).

    None: not told. MIG modes are false on a model that has none.
    """

    index: int
    name: str
    used_mib: int
    total_mib: int
    processes: tuple[GpuProcess, ...]
    bus: str = ""
    bar1_mib: int | None = None
    mig_current: bool | None = None
    mig_pending: bool | None = None
    persistence: bool | None = None
    power_limit_watts: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None


@dataclass(frozen=True)
class GpuFacts:
    """gpus is empty and problem says why when there is no driver, or it does not answer.

    code: the fault's, where there is a problem. lost: GPUs that NVML counts and that do not answer,
    with what NVML says of each; they are not among gpus.
    """

    gpus: tuple[Gpu, ...]
    driver: str | None
    problem: str | None
    code: str | None = None
    lost: tuple[str, ...] = ()


def read_gpus(*, timeout_seconds: float = 30.0, command: Sequence[str] = _COMMAND) -> GpuFacts:
    """All GPUs of this host. Never raises: what goes wrong is in `problem`.

    command: what prints the facts as JSON.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        state = _state(process.pid)
        kill(process)  # a process in D state stays; it is not waited for
        said = f"NVML did not answer in {timeout_seconds:g} s{state}: driver hung"
        return GpuFacts((), None, said, "HOST-GPU-HUNG")
    if process.returncode != 0:
        last = (error.strip().splitlines() or ["no message"])[-1]
        said = f"reading NVML ended with {process.returncode}: {last}"
        return GpuFacts((), None, said, "HOST-GPU-DRIVER")
    return parse_gpus(out)


def parse_gpus(text: str) -> GpuFacts:
    """The facts from their JSON; what is none is a problem of the driver's."""
    from pydantic import TypeAdapter  # only here: the process that asks NVML is to start fast

    try:
        return TypeAdapter(GpuFacts).validate_json(text, strict=True)
    except ValueError:
        said = f"reading NVML gave no facts: {text.strip()[:80]!r}"
        return GpuFacts((), None, said, "HOST-GPU-DRIVER")


def _state(pid: int) -> str:
    try:
        return " (state D)" if psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP else ""
    except psutil.Error:
        return ""


def _query() -> GpuFacts:
    import pynvml  # only here: importing it elsewhere would tie every stage to it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == _MISMATCH:
            said = f"NVML's library and the loaded driver are of two versions: {error}"
            return GpuFacts((), None, said, "HOST-GPU-MISMATCH")
        return GpuFacts((), None, f"no NVIDIA driver: {error}", "HOST-GPU-DRIVER")
    gpus, lost = [], []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_gpu(pynvml, index))
        except pynvml.NVMLError as error:
            lost.append(f"GPU {index}: {error}")
    driver = pynvml.nvmlSystemGetDriverVersion()
    return GpuFacts(tuple(gpus), driver, None, lost=tuple(lost))


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)

    def told(read: Callable[[Any], Any], *, otherwise: Any = None) -> Any:
        try:
            return read(handle)
        except pynvml.NVMLError as error:
            return otherwise if error.value == _NOT_SUPPORTED else None

    processes = {
        process.pid: _process(process.pid, process.usedGpuMemory)
        for read in (
            pynvml.nvmlDeviceGetComputeRunningProcesses,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        )
        for process in read(handle)
    }
    bar1 = told(pynvml.nvmlDeviceGetBAR1MemoryInfo)
    mig = told(pynvml.nvmlDeviceGetMigMode, otherwise=(0, 0))
    persistence = told(pynvml.nvmlDeviceGetPersistenceMode)
    milliwatts = told(pynvml.nvmlDeviceGetPowerManagementLimit)
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        used_mib=memory.used // _MIB,
        total_mib=memory.total // _MIB,
        processes=tuple(processes.values()),
        bus=pynvml.nvmlDeviceGetPciInfo(handle).busId.lower()[-12:],
        bar1_mib=None if bar1 is None else bar1.bar1Total // _MIB,
        mig_current=None if mig is None else bool(mig[0]),
        mig_pending=None if mig is None else bool(mig[1]),
        persistence=None if persistence is None else bool(persistence),
        power_limit_watts=None if milliwatts is None else round(milliwatts / 1000),
        link_width=told(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        link_width_max=told(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
    )


def _process(pid: int, used_bytes: int | None) -> GpuProcess:
    known = used_bytes is not None and used_bytes != _ALL_BITS
    used_mib = (used_bytes or 0) // _MIB if known else 0
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        orphan = parent is not None and (parent.pid == 1 or parent.name() == "systemd")
        return GpuProcess(pid, used_mib, " ".join(process.cmdline())[:200], orphan)
    except psutil.Error:
        return GpuProcess(pid, used_mib, "")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_query())))
