"""What is wrong with the GPUs, their driver and the bus."""

import re
from collections.abc import Iterator

from pipeline.host.finding import Notes
from pipeline.host.gather import HostFacts
from pipeline.host.gpus import Gpu, GpuFacts, GpuProcess
from pipeline.host.lspci import PciFacts
from pipeline.host.packages import upstream
from pipeline.host.reader import Missing
from pipeline.host.wanted import WantedDriver, WantedGpus

_OF_NVML = (
    "HOST-GPU-MODEL", "HOST-GPU-MEMORY", "HOST-GPU-BAR1", "HOST-GPU-HELD", "HOST-GPU-MIG",
    "HOST-GPU-PERSISTENCE", "HOST-GPU-POWER", "HOST-GPU-LINK", "HOST-GPU-COUNT",
)  # fmt: skip
_DRIVER_TAG = "ansible-playbook site.yml --tags nvidia_driver"
_NEXT_STEP = {
    "HOST-GPU-DRIVER": f"{_DRIVER_TAG}; then dkms status and dmesg; in a container: start it with "
    "GPUs, and anew after a daemon-reload of systemd",
    "HOST-GPU-HUNG": "do not ask again: look for processes in state D (ps -eo pid,stat,args), at "
    "dmesg for Xid, then reboot",
    "HOST-GPU-MISMATCH": "reboot (or unload the modules), so that the installed driver is loaded; "
    f"{_DRIVER_TAG} holds its packages",
}
_XID_MEANS = {
    48: "a double-bit memory error",
    79: "the GPU fell off the bus: power, riser or PCIe power saving",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer: reboot",
    120: "an error of the GPU's system processor: reboot",
}
_DRIVER_VERSION = re.compile(r"[0-9]{3,}\.[0-9]+(\.[0-9]+)?")


def check_gpus(wanted: WantedGpus, facts: HostFacts, notes: Notes) -> None:
    """Everything of the area HOST-GPU."""
    pci = facts.pci
    if facts.gpus.problem is not None:
        code = facts.gpus.code or "HOST-GPU-DRIVER"
        notes.fault(
            code,
            "the driver",
            facts.gpus.problem,
            wanted=f"NVML's answer about {wanted.count} GPUs",
            next_step=_NEXT_STEP[code],
        )
        notes.skip((one for one in _OF_NVML if one != "HOST-GPU-COUNT"), facts.gpus.problem)
        if isinstance(pci, Missing):
            notes.skip("HOST-GPU-COUNT", f"{facts.gpus.problem}; {pci.reason}")
        elif len(pci.gpus) != wanted.count:
            _count(notes, f"{len(pci.gpus)} on the bus", wanted.count)
        else:
            notes.skip("HOST-GPU-COUNT", facts.gpus.problem)
    else:
        _check_count(wanted, facts.gpus, pci, notes)
        for gpu in _of_scope(facts.gpus, notes):
            _check_one(wanted, gpu, pci, notes)
            _check_memory_use(wanted, gpu, notes)
    _check_events(facts, notes)


def check_driver(wanted: WantedDriver, facts: HostFacts, notes: Notes) -> None:
    """HOST-DRIVER-BRANCH, and the mismatches that NVML does not see itself."""
    module = facts.module
    if isinstance(module, Missing):
        notes.skip("HOST-DRIVER-BRANCH", f"no NVIDIA module is loaded ({module.reason})")
        if facts.gpus.code != "HOST-GPU-MISMATCH":
            notes.skip("HOST-GPU-MISMATCH", f"no NVIDIA module is loaded ({module.reason})")
        return
    if module.branch < wanted.branch or not module.open:
        notes.fault(
            "HOST-DRIVER-BRANCH",
            "the driver",
            f"{'open' if module.open else 'proprietary'} kernel modules {module.version} loaded",
            wanted=f"open kernel modules, branch {wanted.branch} or newer",
            next_step=f"{_DRIVER_TAG}, then reboot",
        )
    others = {"NVML": facts.gpus.driver} if facts.gpus.driver else {}
    if isinstance(facts.packages, Missing):
        if not notes.scope.container:
            notes.skip("HOST-GPU-MISMATCH", facts.packages.reason)
    elif not notes.scope.container:
        for name in wanted.packages:
            version = upstream(facts.packages[name].version) if name in facts.packages else ""
            if _DRIVER_VERSION.fullmatch(version):
                others[f"package {name}"] = version
    for what, version in others.items():
        if version != module.version:
            notes.fault(
                "HOST-GPU-MISMATCH",
                "the driver",
                f"module {module.version} is loaded, {what} is {version}",
                wanted="one version",
                next_step=_NEXT_STEP["HOST-GPU-MISMATCH"],
            )


def check_acs(facts: HostFacts, notes: Notes) -> None:
    """HOST-KERNEL-ACS: no port sends what one GPU writes to another to the IOMMU first."""
    if isinstance(facts.pci, Missing):
        notes.skip("HOST-KERNEL-ACS", facts.pci.reason)
        return
    for port in facts.pci.ports:
        if port.redirect:
            notes.fault(
                "HOST-KERNEL-ACS",
                port.address,
                f"ACS has {' and '.join(port.redirect)} on",
                wanted="both off: else peer writes are lost or the first all-reduce hangs",
                next_step="ansible-playbook site.yml --tags kernel_cmdline (setpci at each boot)",
            )
    if facts.pci.denied:
        notes.skip("HOST-KERNEL-ACS", "lspci shows ports' capabilities to root only, or is absent")


def _check_count(wanted: WantedGpus, gpus: GpuFacts, pci: PciFacts | Missing, notes: Notes) -> None:
    """The bus has all of the host's; NVML in a container has those that it was given."""
    nvml = len(gpus.gpus)
    lost = f" ({'; '.join(gpus.lost)})" if gpus.lost else ""
    own = notes.scope.gpus
    of_nvml = len(own) if notes.scope.container and own is not None else wanted.count
    if nvml != of_nvml:
        _count(notes, f"{nvml} by NVML{lost}", of_nvml)
    if isinstance(pci, Missing):
        notes.skip("HOST-GPU-COUNT", pci.reason)
    elif len(pci.gpus) != wanted.count:
        _count(notes, f"{len(pci.gpus)} on the bus", wanted.count)


def _count(notes: Notes, found: str, wanted: int) -> None:
    notes.fault(
        "HOST-GPU-COUNT",
        "the GPUs",
        found,
        wanted=f"{wanted} on the bus and by NVML",
        next_step="compare lspci -d 10de: with nvidia-smi -L; look at dmesg, then at power and "
        "seating of what is not there",
    )


def _of_scope(facts: GpuFacts, notes: Notes) -> Iterator[Gpu]:
    own = notes.scope.gpus
    yield from (gpu for gpu in facts.gpus if own is None or gpu.index in own)


def _check_one(wanted: WantedGpus, gpu: Gpu, pci: PciFacts | Missing, notes: Notes) -> None:
    subject = f"GPU {gpu.index}"

    def compare(code: str, found: object, good: bool, *, wanted: str, next_step: str) -> None:
        if found is None:
            notes.skip(code, f"{subject}: NVML does not tell")
        elif not good:
            notes.fault(code, subject, str(found), wanted=wanted, next_step=next_step)

    compare(
        "HOST-GPU-MODEL", gpu.name, gpu.name.startswith(wanted.name),
        wanted=f"{wanted.name}...", next_step="correct ready_host.gpus.name, or the machine",
    )  # fmt: skip
    if (memory := wanted.memory_mib) is not None:
        compare(
            "HOST-GPU-MEMORY", f"{gpu.total_mib} MiB", gpu.total_mib == memory,
            wanted=f"{memory} MiB",
            next_step="look at its ECC mode (nvidia-smi -q -d ECC) and model",
        )  # fmt: skip
    if (bar1 := wanted.bar1_mib_at_least) is not None:
        found = None if gpu.bar1_mib is None else f"BAR1 of {gpu.bar1_mib} MiB"
        compare(
            "HOST-GPU-BAR1", found, (gpu.bar1_mib or 0) >= bar1,
            wanted=f"at least {bar1} MiB",
            next_step="turn on resizable BAR and 4G decoding in the firmware (and the board's "
            "mode without displays)",
        )  # fmt: skip
    if wanted.mig is not None:
        modes = (gpu.mig_current, gpu.mig_pending)
        shown = ", ".join(
            _switch(name, on) for name, on in zip(("now", "pending"), modes, strict=True)
        )
        compare(
            "HOST-GPU-MIG", None if None in modes else f"MIG {shown}", modes == (False, False),
            wanted="MIG off, now and pending",
            next_step=f"nvidia-smi -i {gpu.index} -mig 0, then reset the GPU or reboot",
        )  # fmt: skip
    if wanted.persistence is not None:
        on = gpu.persistence
        compare(
            "HOST-GPU-PERSISTENCE", None if on is None else _switch("persistence", on),
            on == wanted.persistence, wanted=_switch("persistence", wanted.persistence),
            next_step="systemctl enable --now nvidia-persistenced",
        )  # fmt: skip
    if (watts := wanted.power_limit_watts) is not None:
        compare(
            "HOST-GPU-POWER",
            None if gpu.power_limit_watts is None else f"{gpu.power_limit_watts} W",
            gpu.power_limit_watts == watts, wanted=f"{watts} W",
            next_step=f"{_DRIVER_TAG} sets it at each boot",
        )  # fmt: skip
    width, most = _link(gpu, pci)
    compare(
        "HOST-GPU-LINK", None if width is None or most is None else f"{width} PCIe lanes",
        (width or 0) >= (most or 0), wanted=f"all {most} that it has",
        next_step="seat the card or its riser anew; see which slot has how many lanes",
    )  # fmt: skip


def _switch(name: str, on: bool | None) -> str:
    return f"{name} {'on' if on else 'off'}"


def _link(gpu: Gpu, pci: PciFacts | Missing) -> tuple[int | None, int | None]:
    """Lanes now and at most; the board's own number where the bus tells it, not the slot's."""
    if not isinstance(pci, Missing):
        for one in pci.gpus:
            if gpu.bus.endswith(one.address) and None not in (one.link_width, one.link_width_max):
                return one.link_width, one.link_width_max
    return gpu.link_width, gpu.link_width_max


def _check_memory_use(wanted: WantedGpus, gpu: Gpu, notes: Notes) -> None:
    most = wanted.idle_mib_at_most
    if most is None:
        return
    for process in gpu.processes:
        who, where = _holder(process, container=notes.scope.container)
        notes.fault(
            "HOST-GPU-HELD",
            f"GPU {gpu.index}",
            f"{process.used_mib} MiB held by {who}",
            wanted="no process on it",
            next_step=where,
        )
    if gpu.used_mib > most and not gpu.processes:
        notes.fault(
            "HOST-GPU-HELD",
            f"GPU {gpu.index}",
            f"{gpu.used_mib} MiB used by no process that is visible here",
            wanted=f"at most {most} MiB",
            next_step="look on the host, as root: fuser -v /dev/nvidia*, docker ps; memory that "
            "nobody holds any more goes with a reset of the GPU or a reboot",
        )


def _holder(process: GpuProcess, *, container: bool) -> tuple[str, str]:
    """Who it is and what to do; a PID that NVML gives is the host's."""
    if container or not process.command:
        return (
            f"host PID {process.pid}, which is not visible here",
            f"look on the host, as root: ps -p {process.pid} -o pid,user,args and docker ps",
        )
    orphan = " (a child of init: a service, or left by a launcher that died)"
    return (
        f"PID {process.pid} {process.command}{orphan if process.orphan else ''}",
        "stop it (this project never kills what it did not start)",
    )


def _check_events(facts: HostFacts, notes: Notes) -> None:
    if isinstance(facts.events, Missing):
        notes.skip("HOST-GPU-XID", facts.events.reason)
        return
    own = notes.scope.gpus
    buses = None if own is None else {gpu.bus for gpu in facts.gpus.gpus if gpu.index in own}
    counted: dict[tuple[str, int | None], list[str]] = {}
    for event in facts.events:
        if not buses or not event.bus or any(bus.startswith(event.bus) for bus in buses):
            counted.setdefault((event.bus, event.number), []).append(event.text)
    for (bus, number), texts in counted.items():
        means = f", {_XID_MEANS[number]}" if number in _XID_MEANS else ""
        what = "a halt of the GPU's system processor" if number is None else f"Xid {number}{means}"
        notes.fault(
            "HOST-GPU-XID",
            bus or "the kernel's log",
            f"{what}, {len(texts)} times since boot: {texts[-1][:160]}",
            wanted="no GPU error since the kernel was started",
            next_step="find the cause (NVIDIA's table of Xid errors), then reboot",
        )
