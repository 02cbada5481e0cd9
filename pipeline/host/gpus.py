"""GPUs as NVML sees them, read in a process of its own so that a hung driver is a result.

Run as a module it prints the facts as JSON; `read_gpus` starts it with a time limit.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import psutil

_MIB = 1 << 20


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU. command is empty when its pid is not visible here."""

    pid: int
    used_mib: int
    command: str


@dataclass(frozen=True)
class Gpu:
    """One GPU: used_mib leaves out what the driver reserves for itself (NVML memory info v2)."""

    index: int
    name: str
    used_mib: int
    total_mib: int
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class GpuFacts:
    """gpus is empty and problem says why when there is no driver, or it does not answer."""

    gpus: tuple[Gpu, ...]
    driver: str | None
    problem: str | None


def read_gpus(*, timeout_seconds: float = 30.0) -> GpuFacts:
    """All GPUs of this host. Never raises: what goes wrong is in `problem`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.host.gpus"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, error = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # a process in D state stays; it is not waited for
        return GpuFacts((), None, f"NVML did not answer in {timeout_seconds:.0f} s: driver hung")
    if process.returncode != 0:
        last = (error.strip().splitlines() or ["no message"])[-1]
        return GpuFacts((), None, f"reading NVML ended with {process.returncode}: {last}")
    value = json.loads(out)
    gpus = tuple(
        Gpu(**{**gpu, "processes": tuple(GpuProcess(**p) for p in gpu["processes"])})
        for gpu in value["gpus"]
    )
    return GpuFacts(gpus, value["driver"], value["problem"])


def _query() -> GpuFacts:
    import pynvml  # only here: importing it elsewhere would tie every stage to it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuFacts((), None, f"no NVIDIA driver: {error}")
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        processes = {
            process.pid: GpuProcess(
                process.pid, (process.usedGpuMemory or 0) // _MIB, _command(process.pid)
            )
            for read in (
                pynvml.nvmlDeviceGetComputeRunningProcesses,
                pynvml.nvmlDeviceGetGraphicsRunningProcesses,
            )
            for process in read(handle)
        }
        gpus.append(
            Gpu(
                index,
                pynvml.nvmlDeviceGetName(handle),
                memory.used // _MIB,
                memory.total // _MIB,
                tuple(processes.values()),
            )
        )
    return GpuFacts(tuple(gpus), pynvml.nvmlSystemGetDriverVersion(), None)


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.Error:
        return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_query())))
