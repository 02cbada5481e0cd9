"""GPUs, driver and bus: from a ready host, one thing is changed, and its code is the only one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pipeline.host.checks import examine
from pipeline.host.codes import CODES
from pipeline.host.driver import Module
from pipeline.host.finding import Finding, Scope
from pipeline.host.gather import HostFacts
from pipeline.host.gpus import GpuFacts, GpuProcess
from pipeline.host.logs import Event
from pipeline.host.lspci import Port
from pipeline.host.packages import Package
from pipeline.host.reader import Missing
from pipeline.host.wanted import Wanted

Change = Callable[[HostFacts], HostFacts]
UNREAD = Missing("as nobody")


def gpu(index: int = 1, **values: Any) -> Change:
    """Changes one GPU as NVML tells it."""

    def change(facts: HostFacts) -> HostFacts:
        gpus = list(facts.gpus.gpus)
        gpus[index] = replace(gpus[index], **values)
        return replace(facts, gpus=replace(facts.gpus, gpus=tuple(gpus)))

    return change


def nvml(**values: Any) -> Change:
    return lambda facts: replace(facts, gpus=replace(facts.gpus, **values))


def bus(**values: Any) -> Change:
    return lambda facts: replace(facts, pci=replace(facts.pci, **values))


def one_less(facts: HostFacts) -> HostFacts:
    return replace(facts, gpus=replace(facts.gpus, gpus=facts.gpus.gpus[:1], lost=("GPU 1: lost",)))


def one_less_on_the_bus(facts: HostFacts) -> HostFacts:
    return replace(facts, pci=replace(facts.pci, gpus=facts.pci.gpus[:1]))


def few_lanes(facts: HostFacts) -> HostFacts:
    first, second = facts.pci.gpus
    return replace(facts, pci=replace(facts.pci, gpus=(first, replace(second, link_width=8))))


def newer_package(facts: HostFacts) -> HostFacts:
    package = Package("nvidia-open", "580.105.08-1", held=True)
    return replace(facts, packages={**facts.packages, "nvidia-open": package})


def module(version: str = "580.95.05", *, open_: bool = True) -> Change:
    return lambda facts: replace(
        facts, module=Module(version, open_), gpus=replace(facts.gpus, driver=version), packages={}
    )


def events(*found: Event) -> Change:
    return lambda facts: replace(facts, events=found)


SERVER = GpuProcess(4242, 600, "python -m sglang")
XID = Event("0000:61:00", 79, "NVRM: Xid (PCI:0000:61:00): 79, GPU has fallen off the bus.")
FAULTS = [
    ("HOST-GPU-COUNT", one_less, "1 by NVML (GPU 1: lost)"),
    ("HOST-GPU-COUNT", one_less_on_the_bus, "1 on the bus"),
    ("HOST-GPU-MODEL", gpu(name="NVIDIA H200"), "NVIDIA H200"),
    ("HOST-GPU-MEMORY", gpu(total_mib=97000), "97000 MiB"),
    ("HOST-GPU-BAR1", gpu(bar1_mib=256), "BAR1 of 256 MiB"),
    ("HOST-GPU-MIG", gpu(mig_current=True, mig_pending=True), "MIG now on, pending on"),
    ("HOST-GPU-MIG", gpu(mig_pending=True), "MIG now off, pending on"),
    ("HOST-GPU-PERSISTENCE", gpu(persistence=False), "persistence off"),
    ("HOST-GPU-POWER", gpu(power_limit_watts=300), "300 W"),
    ("HOST-GPU-LINK", few_lanes, "8 PCIe lanes"),
    ("HOST-GPU-HELD", gpu(processes=(SERVER,), used_mib=600), "600 MiB held by PID 4242 python"),
    ("HOST-GPU-HELD", gpu(used_mib=1), "1 MiB used by no process that is visible here"),
    ("HOST-GPU-XID", events(XID), "Xid 79, the GPU fell off the bus: power"),
    ("HOST-GPU-XID", events(Event("", None, "GSP halt")), "a halt of the GPU's system processor"),
    ("HOST-GPU-MISMATCH", nvml(driver="580.105.08"), "module 580.95.05 is loaded, NVML is 580.105"),
    ("HOST-DRIVER-BRANCH", module("575.64.03"), "open kernel modules 575.64.03"),
    ("HOST-DRIVER-BRANCH", module(open_=False), "proprietary kernel modules 580.95.05"),
    ("HOST-KERNEL-ACS", bus(ports=(Port("0000:40:01.1", "x", ("ReqRedir",)),)), "ReqRedir on"),
]


def found(wanted: Wanted, facts: HostFacts, scope: Scope | None = None) -> list[Finding]:
    """Findings but those about packages, which the changes of the driver bring along."""
    findings = examine(wanted, facts, scope or Scope()).findings
    return [one for one in findings if one.code != "HOST-DRIVER-HELD"]


@pytest.mark.parametrize(("code", "change", "said"), FAULTS)
def test_each_fault_has_its_code_and_no_other(
    wanted: Wanted, ready: HostFacts, code: str, change: Change, said: str
) -> None:
    one = found(wanted, change(ready))
    assert [finding.code for finding in one] == [code]
    assert said in one[0].found
    assert one[0].next_step


def test_every_code_of_gpus_is_told_by_some_test() -> None:
    told = {code for code, _, _ in FAULTS} | {"HOST-GPU-DRIVER", "HOST-GPU-HUNG"}  # further down
    assert {code for code in CODES if code.startswith("HOST-GPU-")} <= told


def test_a_module_that_is_older_than_the_installed_packages_wants_a_reboot(
    wanted: Wanted, ready: HostFacts
) -> None:
    (mismatch,) = found(wanted, newer_package(ready))
    assert mismatch.code == "HOST-GPU-MISMATCH"
    assert mismatch.found == "module 580.95.05 is loaded, package nvidia-open is 580.105.08"
    assert "reboot" in mismatch.next_step


@pytest.mark.parametrize("code", ["HOST-GPU-DRIVER", "HOST-GPU-HUNG", "HOST-GPU-MISMATCH"])
def test_where_nvml_does_not_answer_every_check_of_it_is_skipped_and_none_passes(
    wanted: Wanted, ready: HostFacts, code: str
) -> None:
    facts = replace(ready, gpus=GpuFacts((), None, "no answer", code))
    verdict = examine(wanted, facts)
    assert [finding.code for finding in verdict.findings] == [code]
    skipped = {skip.check for skip in verdict.skipped}
    assert {"HOST-GPU-HELD", "HOST-GPU-BAR1", "HOST-GPU-COUNT", "HOST-GPU-MIG"} <= skipped


@pytest.mark.parametrize(
    ("process", "container", "who", "where"),
    [
        (SERVER, False, "PID 4242 python -m sglang", "stop it"),
        (replace(SERVER, orphan=True), False, "a child of init", "stop it"),
        (replace(SERVER, command=""), False, "host PID 4242", "look on the host"),
        (SERVER, True, "host PID 4242", "look on the host"),  # the number means another one here
    ],
)
def test_who_holds_a_gpu_is_named_or_where_to_look_for_it(
    wanted: Wanted, ready: HostFacts, process: GpuProcess, container: bool, who: str, where: str
) -> None:
    scope = Scope(container=container, gpus=(0, 1))
    (held,) = found(wanted, gpu(processes=(process,))(ready), scope)
    assert who in held.found
    assert where in held.next_step


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (gpu(bar1_mib=None), "HOST-GPU-BAR1"),
        (gpu(mig_pending=None), "HOST-GPU-MIG"),
        (gpu(persistence=None), "HOST-GPU-PERSISTENCE"),
        (gpu(power_limit_watts=None), "HOST-GPU-POWER"),
        (bus(denied=True), "HOST-KERNEL-ACS"),
        (lambda facts: replace(facts, events=UNREAD), "HOST-GPU-XID"),
        (lambda facts: replace(facts, module=UNREAD), "HOST-DRIVER-BRANCH"),
        (lambda facts: replace(facts, module=UNREAD), "HOST-GPU-MISMATCH"),
        (lambda facts: replace(facts, packages=UNREAD), "HOST-GPU-MISMATCH"),
        (lambda facts: replace(facts, pci=UNREAD), "HOST-GPU-COUNT"),
        (lambda facts: replace(facts, pci=UNREAD), "HOST-KERNEL-ACS"),
    ],
)
def test_what_is_not_known_is_skipped_and_the_host_is_not_called_ready(
    wanted: Wanted, ready: HostFacts, change: Change, code: str
) -> None:
    verdict = examine(wanted, change(ready))
    assert verdict.findings == ()
    assert code in {skip.check for skip in verdict.skipped}
    assert not verdict.ready


def test_lanes_are_nvmls_where_the_bus_does_not_tell(wanted: Wanted, ready: HostFacts) -> None:
    silent = replace(ready, pci=replace(ready.pci, gpus=tuple(
        replace(one, link_width=None) for one in ready.pci.gpus)))  # fmt: skip
    (short,) = found(wanted, gpu(link_width=4)(silent))
    assert (short.code, short.found) == ("HOST-GPU-LINK", "4 PCIe lanes")
    unknown = examine(wanted, gpu(link_width=None)(silent))
    assert "HOST-GPU-LINK" in {skip.check for skip in unknown.skipped}


@pytest.mark.parametrize(
    "change", [gpu(used_mib=600), gpu(mig_pending=True), events(XID)], ids=["held", "mig", "xid"]
)
def test_a_stage_is_not_kept_from_its_gpus_by_another_one(
    wanted: Wanted, ready: HostFacts, change: Change
) -> None:
    assert found(wanted, change(ready), Scope(gpus=(0,))) == []
    assert len(found(wanted, change(ready), Scope(gpus=(0, 1)))) == 1


def test_a_halt_that_names_no_gpu_concerns_every_stage(wanted: Wanted, ready: HostFacts) -> None:
    halted = events(Event("", None, "GSP halt"))(ready)
    assert [one.code for one in found(wanted, halted, Scope(gpus=(0,)))] == ["HOST-GPU-XID"]


def test_in_a_container_nvml_counts_its_own_gpus_and_the_bus_all(
    wanted: Wanted, ready: HostFacts
) -> None:
    own = one_less(ready)
    assert found(wanted, own, Scope(container=True, gpus=(0,))) == []
    (count,) = found(wanted, own, Scope(container=True, gpus=(0, 1)))
    assert count.code == "HOST-GPU-COUNT"


def test_events_of_one_kind_are_counted(wanted: Wanted, ready: HostFacts) -> None:
    (one,) = found(wanted, events(XID, XID, XID)(ready))
    assert "3 times since boot" in one.found
    assert one.subject == "0000:61:00"


def test_what_is_null_is_not_checked(wanted: Wanted, ready: HostFacts) -> None:
    assert wanted.gpus
    names = ("memory_mib", "bar1_mib_at_least", "idle_mib_at_most", "mig", "persistence",
             "power_limit_watts")  # fmt: skip
    free = wanted.gpus.model_copy(update=dict.fromkeys(names))
    facts = gpu(total_mib=1, bar1_mib=1, used_mib=5, processes=(SERVER,), mig_current=True,
                persistence=False, power_limit_watts=1)(ready)  # fmt: skip
    assert found(wanted.model_copy(update={"gpus": free}), facts) == []
