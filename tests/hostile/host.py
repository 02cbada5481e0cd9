"""A host that was never there (SIMULATED), every word of it a file that `mutate.py` can spoil."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.host.checks import examine
from pipeline.host.finding import Scope
from pipeline.host.gather import gather
from pipeline.host.gpus import parse_gpus
from pipeline.host.preflight import Preflight
from pipeline.host.reader import HostReader, Missing, Output
from pipeline.host.smi import read_smi
from pipeline.host.wanted import read_wanted

WANTED = Path(__file__).parent.parent.parent / "ansible" / "group_vars" / "gpu_hosts.yml"
SMI = """
Driver Version                            : 580.95.05
GPU 00000000:41:00.0
    Product Name                          : NVIDIA
    MIG Mode
        Current                           : Disabled
    PCI
        GPU Link Info
            Link Width
                Max                       : 16x
    FB Memory Usage
        Total                             : 97887 MiB
        Used                              : 0 MiB
    GPU Power Readings
        Current Power Limit               : 600.00 W
    Processes
        Process ID                        : 11
            Name                          : python
            Used GPU Memory               : 600 MiB
"""
LSPCI = """
0000:40:01.1 PCI bridge [0604]: Advanced Micro Devices, Inc. [AMD] Root Port [1022:14a5]
\tACSCtl:\tSrcValid- ReqRedir+ CmpltRedir-
0000:41:00.0 3D controller [0302]: NVIDIA Corporation GB202GL [10de:2bb5] (rev a1)
\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1
\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16
\tKernel driver in use: nvidia
"""
GPU = {
    "index": 0, "name": "NVIDIA", "used_mib": 0, "total_mib": 97887, "bus": "0000:41:00.0",
    "processes": [{"pid": 11, "used_mib": 600, "command": "python", "orphan": False}],
    "bar1_mib": 131072, "mig_current": False, "mig_pending": None, "persistence": True,
    "power_limit_watts": 600, "link_width": 16, "link_width_max": 16,
}  # fmt: skip
SAID = {
    "docker": json.dumps({"ServerVersion": "20.10.24", "Runtimes": {"runc": {}, "nvidia": {}}}),
    "nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.18.1\n",
    "nvidia-smi": SMI,
    "gpus": json.dumps(
        {"gpus": [GPU], "driver": "580.95.05", "problem": None, "code": None, "lost": ["GPU 1: x"]}
    ),
    "lspci": LSPCI,
    "dpkg-query": "hi |nvidia-driver|580.95.05-1\nun |docker.io|\n",
    "getent": "cleanslate:x:2000:2000::/srv:/bin/sh\n",
    "id": "cleanslate docker\n",
    "dkms": "nvidia/580.95.05, 6.1.0-40-amd64, x86_64: installed\n",
    "journalctl": "[    0.000000] kernel: Linux\n[ 9.0] NVRM: Xid (PCI:0000:41:00): 79, x\n",
    "busctl": "b false\n",
}
FILES = {
    "/etc/docker/daemon.json": json.dumps({"runtimes": {"nvidia": {"path": "n"}}, "a": [1]}),
    "/etc/cleanslate/nccl.json": json.dumps({"training": {"NCCL_ALGO": "Ring"}}),
    "/proc/self/mounts": "tmpfs /mnt/hs\\040x tmpfs rw 0 0\ntmpfs /mnt/hs tmpfs rw 0 0\n",
    "/proc/self/limits": "Max stack size    67108864    unlimited    bytes\n"
    "Max open files    65536    524288    files\nMax locked memory    unlimited    x    bytes\n",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
    "580.95.05  Release Build\n",
    "/proc/sys/kernel/osrelease": "6.1.0-40-amd64\n",
    "/proc/cmdline": "quiet iommu=pt\n",
    "/proc/sys/vm/swappiness": "0\n",
}


@dataclass(frozen=True)
class Flat(HostReader):
    """Files and words of commands, all in one folder."""

    def command(self, *arguments: str, seconds: float = 10.0) -> Output | Missing:
        text = self.text(f"/{arguments[0]}")
        return text if isinstance(text, Missing) else Output(0, text)

    def _at(self, path: str) -> Path:
        return self.root / flat(path)


def flat(path: str) -> str:
    return path.lstrip("/").replace("/", "-")


def make_host(folder: Path) -> None:
    folder.mkdir()
    for path, text in {**FILES, **SAID}.items():
        (folder / flat(path)).write_text(text)


_wanted = cache(read_wanted)


def host(path: Path) -> None:
    """All that preflight does with it; nothing that is spoilt is a fault, it is told as found."""
    reader, wanted = Flat(path.parent), _wanted(WANTED)
    said = (path.parent / "gpus").read_text(errors="replace")
    for gpus in (lambda: read_smi(reader), lambda: parse_gpus(said)):
        facts = gather(wanted, reader, Scope(own_limits=True), gpus=gpus)
        found = Preflight(examine(wanted, facts), facts)
        found.as_json()
        "\n".join(found.lines()).encode(errors="backslashreplace")
