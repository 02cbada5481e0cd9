"""A stand-in for the module pynvml: answers what the file `scene.json` beside it says."""

# ruff: noqa: N802, N816  the names are NVML's

import json
from pathlib import Path
from types import SimpleNamespace

SCENE = json.loads(Path(__file__).with_name("scene.json").read_text())
nvmlMemory_v2 = 0x02000028
GIB = 1 << 30


class NVMLError(Exception):
    def __init__(self, value, text):
        super().__init__(text)
        self.value = value


def fails(name, index=""):
    for key in (name, f"{name}.{index}"):
        if key in SCENE.get("errors", {}):
            raise NVMLError(*SCENE["errors"][key])


def nvmlInit():
    fails("init")


def nvmlDeviceGetCount():
    return SCENE.get("count", 1)


def nvmlSystemGetDriverVersion():
    return "580.95.05"


def nvmlDeviceGetHandleByIndex(index):
    fails("handle", index)
    return index


def nvmlDeviceGetName(handle):
    return "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def nvmlDeviceGetMemoryInfo(handle, version):
    assert version == nvmlMemory_v2
    return SimpleNamespace(used=SCENE.get("used_mib", 0) << 20, total=97887 << 20)


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=p, usedGpuMemory=used) for p, used in SCENE.get("processes", [])]


def nvmlDeviceGetGraphicsRunningProcesses(handle):
    return []


def nvmlDeviceGetBAR1MemoryInfo(handle):
    fails("bar1")
    return SimpleNamespace(bar1Total=128 * GIB)


def nvmlDeviceGetMigMode(handle):
    fails("mig")
    return SCENE.get("mig", [0, 0])


def nvmlDeviceGetPersistenceMode(handle):
    return 1


def nvmlDeviceGetPowerManagementLimit(handle):
    return 600000


def nvmlDeviceGetPciInfo(handle):
    return SimpleNamespace(busId="00000000:C1:00.0")


def nvmlDeviceGetCurrPcieLinkWidth(handle):
    return 16


def nvmlDeviceGetMaxPcieLinkWidth(handle):
    return 16
