"""A whole recorded host, read and judged; and that nothing is read which nobody asked for."""

import json
import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeline.host.checks import examine
from pipeline.host.finding import Scope, Verdict
from pipeline.host.gather import NOT_READ, HostFacts, gather
from pipeline.host.gpus import GpuFacts
from pipeline.host.nccl import FILE
from pipeline.host.reader import Missing
from pipeline.host.wanted import Wanted


def nothing() -> GpuFacts:
    raise AssertionError("nobody asked for GPUs")


def test_a_stage_without_gpus_wakes_no_driver(wanted: Wanted, recorded: Callable) -> None:
    scope = Scope(frozenset({"HOST-TMPFS-SIZE", "HOST-SYSCTL"}))
    facts = gather(wanted, recorded({"/proc/self/mounts": ""}), scope, gpus=nothing)
    assert facts.gpus == HostFacts().gpus
    assert facts.pci is facts.docker is facts.limits is facts.nccl is NOT_READ
    assert facts.tmpfs is not NOT_READ
    assert set(facts.sysctl) == {"vm.swappiness", "kernel.numa_balancing"}
    assert set(facts.as_json()) <= {"gpus", "tmpfs", "sysctl", "folders"}


def test_an_empty_host_raises_nothing_and_passes_no_hardware(
    wanted: Wanted, recorded: Callable
) -> None:
    absent = GpuFacts((), None, "no NVIDIA driver", "HOST-GPU-DRIVER")
    facts = gather(wanted, recorded(), Scope(), gpus=lambda: absent)
    verdict = examine(wanted, facts)
    assert not verdict.ready
    told = {*(skip.check for skip in verdict.skipped), *(one.code for one in verdict.findings)}
    assert {"HOST-GPU-DRIVER", "HOST-GPU-COUNT", "HOST-GPU-BAR1", "HOST-KERNEL-ACS"} <= told
    assert {"HOST-GPU-XID", "HOST-CPU-GOVERNOR", "HOST-DRIVER-BRANCH"} <= told


@pytest.mark.parametrize(
    ("where", "own"), [({}, False), ({"container": True}, True), ({"own_limits": True}, True)]
)
def test_limits_are_the_run_users_and_of_a_stage_its_own(
    wanted: Wanted,
    recorded: Callable,
    where: dict[str, bool],
    own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    text = "".join(
        f"{name:<26}unlimited            unlimited            x\n"
        for name in ("Max locked memory", "Max stack size", "Max open files")
    )
    scope = replace(Scope(frozenset({"HOST-LIMITS"})), **where)
    facts = gather(wanted, recorded({"/proc/self/limits": text}), scope, gpus=nothing)
    assert isinstance(facts.limits, Missing) is not own


def test_the_file_of_nccls_variables_is_read_and_judged(wanted: Wanted, recorded: Callable) -> None:
    scope = Scope(frozenset({"HOST-NCCL-PROFILE"}))
    assert wanted.nccl
    right = recorded({FILE: json.dumps(wanted.nccl.model_dump())})
    assert examine(wanted, gather(wanted, right, scope, gpus=nothing), scope) == Verdict()
    other = gather(wanted, recorded({FILE: "{}"}), scope, gpus=nothing)
    (fault,) = examine(wanted, other, scope).findings
    assert (fault.code, fault.subject) == ("HOST-NCCL-PROFILE", FILE)
    assert fault.next_step.endswith("ansible-playbook site.yml --tags nccl")
    not_wanted = wanted.model_copy(update={"nccl": None})
    assert examine(not_wanted, other, scope) == Verdict()


def test_without_packages_dpkg_is_not_asked(wanted: Wanted, recorded: Callable) -> None:
    nothing_held = wanted.model_copy(update={"driver": None, "containers": None})
    scope = Scope(frozenset({"HOST-DRIVER-HELD"}))
    assert gather(nothing_held, recorded(), scope, gpus=nothing).packages == {}
