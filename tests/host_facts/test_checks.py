"""All but the GPUs: from a ready host, one thing is changed, and its code is the only one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pipeline.host.checks import check_host, examine
from pipeline.host.codes import CODES
from pipeline.host.finding import Scope, Verdict
from pipeline.host.gather import HostFacts
from pipeline.host.kernel import Build
from pipeline.host.limits import Limits
from pipeline.host.logind import RemoveIpc
from pipeline.host.packages import Package
from pipeline.host.reader import Entry, Missing, Room
from pipeline.host.wanted import Wanted

Change = Callable[[HostFacts], HostFacts]
UNREAD = Missing("as nobody")
SHM = Scope(shm_bytes=32 << 30)


def part(name: str, **values: Any) -> Change:
    """Changes values of one fact."""
    return lambda facts: replace(facts, **{name: replace(getattr(facts, name), **values)})


def whole(**values: Any) -> Change:
    return lambda facts: replace(facts, **values)


def package(version: str, *, held: bool) -> Change:
    name = "nvidia-container-toolkit"
    return lambda facts: replace(
        facts, packages={**facts.packages, name: Package(name, version, held)}
    )


def line(*words: str) -> Change:
    return part("kernel", command_line=words)


def builds(*states: str) -> Change:
    return part("kernel", dkms=tuple(
        Build("nvidia", "580.95.05", f"6.1.0-{40 + n}-amd64", state)
        for n, state in enumerate(states)))  # fmt: skip


def limits(**soft: int | None) -> Change:
    return lambda facts: replace(facts, limits=Limits("cleanslate", {**facts.limits.soft, **soft}))


WORDS = ("iommu=pt", "pcie_aspm=off", "pcie_port_pm=off")
FAULTS = [
    ("HOST-DRIVER-HELD", whole(packages={}), "not installed"),
    ("HOST-DRIVER-HELD", package("1.19.0-1", held=True), "version 1.19.0-1"),
    ("HOST-DRIVER-HELD", package("1.18.1-1", held=False), "not held: the next upgrade"),
    ("HOST-KERNEL-CMDLINE", line(*WORDS[1:]), "no iommu"),
    ("HOST-KERNEL-CMDLINE", line("iommu=off", *WORDS[1:]), "iommu=off"),
    ("HOST-KERNEL-CMDLINE", line(*WORDS, "pcie_aspm=force"), "then pcie_aspm=force, which wins"),
    ("HOST-KERNEL-HEADERS", part("kernel", headers=("6.1.0-40-amd64",)), "no headers"),
    ("HOST-KERNEL-DKMS", builds("installed"), "not known to DKMS"),
    ("HOST-KERNEL-DKMS", builds("installed", "built"), "the driver is built"),
    ("HOST-TMPFS-MISSING", part("tmpfs", kind=None), "nothing is mounted there"),
    ("HOST-TMPFS-MISSING", part("tmpfs", kind="ext4"), "ext4 is mounted there"),
    ("HOST-TMPFS-SIZE", part("tmpfs", room=Room(1 << 20, 0)), "a live size of 1048576 bytes"),
    ("HOST-TMPFS-OWNER", part("tmpfs", entry=Entry(0, 0, 0o1777, True)), "belongs to uid 0"),
    ("HOST-SHM-SIZE", whole(shm=Room(64 << 20, 64 << 20)), "64 MiB free of 64"),
    ("HOST-SHM-SIZE", whole(shm=Room(64 << 30, 1 << 20)), "1 MiB free of 65536"),
    ("HOST-SHM-REMOVEIPC", whole(remove_ipc=RemoveIpc(True, live=False)), "yes in its files"),
    ("HOST-SHM-REMOVEIPC", whole(remove_ipc=RemoveIpc(False, live=True)), "in the running logind"),
    ("HOST-SYSCTL", whole(sysctl={"vm.swappiness": "60", "kernel.numa_balancing": "0"}), "60"),
    ("HOST-CPU-GOVERNOR", whole(governors={"cpu0": "performance", "cpu1": "powersave"}),
     "1 of 2 on powersave"),
    ("HOST-LIMITS", limits(memlock=1 << 40), "1099511627776"),
    ("HOST-LIMITS", limits(stack=8 << 20), "8388608"),
    ("HOST-LIMITS", limits(nofile=1024), "1024"),
    ("HOST-DOCKER-ENGINE", part("docker", engine=Missing("docker did not answer in 15 s")),
     "did not answer"),
    ("HOST-DOCKER-TOOLKIT", lambda facts: part(
        "docker", engine=replace(facts.docker.engine, runtimes=("runc",)))(facts),
     "the running engine has no runtime nvidia"),
    ("HOST-DOCKER-TOOLKIT", part("docker", toolkit=Missing("nvidia-ctk: No such file")),
     "nvidia-ctk: No such file"),
    ("HOST-DOCKER-DAEMON", part("docker", daemon=Missing("no file")), "no file"),
    ("HOST-DOCKER-DAEMON", part("docker", daemon=[]), "holds list"),
    ("HOST-DOCKER-DAEMON", lambda facts: part(
        "docker", daemon={**facts.docker.daemon, "debug": True})(facts), "other values of debug"),
    ("HOST-USER", whole(user=None), "no such user"),
    ("HOST-USER", part("user", uid=1001), "uid 1001"),
    ("HOST-USER", part("user", groups=("cleanslate",)), "not in docker"),
    ("HOST-USER-DIRECTORY", whole(folders={}), "not read"),
    ("HOST-USER-DIRECTORY", lambda facts: replace(facts, folders={
        **facts.folders, "/srv/cleanslate": Entry(0, 0, 0o755, folder=True)}), "belongs to uid 0"),
    ("HOST-USER-DIRECTORY", lambda facts: replace(facts, folders={
        **facts.folders, "/srv/cleanslate": Entry(2000, 0, 0o644, folder=False)}), "no folder"),
    ("HOST-NCCL-PROFILE", whole(nccl=Missing("no file")), "no file"),
    ("HOST-NCCL-PROFILE", lambda facts: replace(facts, nccl={
        **facts.nccl, "training": {}}), "other values of training.NCCL_IB_DISABLE"),
]  # fmt: skip


def test_a_host_that_is_all_that_is_wanted_is_ready(wanted: Wanted, ready: HostFacts) -> None:
    assert examine(wanted, ready, SHM) == Verdict()
    assert check_host(wanted, ready) == ()


@pytest.mark.parametrize(("code", "change", "said"), FAULTS)
def test_each_fault_has_its_code_and_no_other(
    wanted: Wanted, ready: HostFacts, code: str, change: Change, said: str
) -> None:
    findings = examine(wanted, change(ready), SHM).findings
    assert {finding.code for finding in findings} == {code}
    assert said in findings[0].found
    assert findings[0].wanted
    assert findings[0].next_step


SKIPS = [
    ("HOST-DRIVER-HELD", whole(packages=UNREAD)),
    ("HOST-KERNEL-CMDLINE", part("kernel", command_line=UNREAD)),
    ("HOST-KERNEL-CMDLINE", whole(kernel=UNREAD)),
    ("HOST-KERNEL-DKMS", part("kernel", dkms=UNREAD)),
    ("HOST-KERNEL-HEADERS", part("kernel", running=UNREAD, installed=UNREAD)),
    ("HOST-TMPFS-SIZE", whole(tmpfs=UNREAD)),
    ("HOST-TMPFS-MISSING", part("tmpfs", kind=UNREAD)),
    ("HOST-TMPFS-SIZE", part("tmpfs", room=UNREAD)),
    ("HOST-TMPFS-OWNER", part("tmpfs", entry=UNREAD)),
    ("HOST-SHM-SIZE", whole(shm=UNREAD)),
    ("HOST-SHM-REMOVEIPC", whole(remove_ipc=UNREAD)),
    ("HOST-SHM-REMOVEIPC", part("remove_ipc", live=UNREAD)),
    ("HOST-SYSCTL", whole(sysctl={})),
    ("HOST-CPU-GOVERNOR", whole(governors=UNREAD)),
    ("HOST-LIMITS", whole(limits=UNREAD)),
    ("HOST-DOCKER-ENGINE", whole(docker=UNREAD)),
    ("HOST-DOCKER-ENGINE", part("docker", engine=UNREAD, denied=True)),
    ("HOST-USER", whole(user=UNREAD)),
]


@pytest.mark.parametrize(("code", "change"), SKIPS)
def test_what_could_not_be_read_is_skipped_with_its_reason(
    wanted: Wanted, ready: HostFacts, code: str, change: Change
) -> None:
    verdict = examine(wanted, change(ready), SHM)
    assert verdict.findings == ()
    assert code in {skip.check for skip in verdict.skipped}
    assert all(skip.reason for skip in verdict.skipped)


@pytest.mark.parametrize("section", list(Wanted.model_fields))
def test_a_part_that_is_null_is_not_checked(wanted: Wanted, section: str) -> None:
    nothing = wanted.model_copy(update=dict.fromkeys(Wanted.model_fields))
    alone = nothing.model_copy(update={section: getattr(wanted, section)})
    without = wanted.model_copy(update={section: None})
    codes = {skip.check for skip in examine(alone, HostFacts()).skipped}
    codes |= {finding.code for finding in examine(alone, HostFacts()).findings}
    left = examine(without, HostFacts())
    others = {*(s.check for s in left.skipped), *(f.code for f in left.findings)}
    shared = {"HOST-DRIVER-HELD", "HOST-GPU-MISMATCH"}  # packages are of driver and containers
    assert not (codes & others) - shared
    assert codes


def test_without_a_wanted_size_shm_is_not_judged(wanted: Wanted, ready: HostFacts) -> None:
    assert examine(wanted, replace(ready, shm=Room(0, 0))).findings == ()


def test_every_code_is_told_by_some_test() -> None:
    from_gpus = {code for code in CODES if code.startswith("HOST-GPU-")}
    told = {code for code, _, _ in FAULTS} | from_gpus | {"HOST-KERNEL-ACS", "HOST-DRIVER-BRANCH"}
    assert told == set(CODES)


@pytest.mark.parametrize(
    ("memlock", "found", "said"),
    [
        ("unlimited", 1 << 40, ["unlimited"]),
        ("unlimited", None, []),
        (1 << 30, 1 << 20, ["at least 1073741824"]),
        (1 << 30, 1 << 30, []),
        (1 << 30, None, []),
        (None, 0, []),
    ],
)
def test_a_limit_is_a_least_value_and_null_is_none(
    wanted: Wanted, ready: HostFacts, memlock: str | int | None, found: int | None, said: list[str]
) -> None:
    assert wanted.limits
    update = {"memlock": memlock, "stack_bytes": None, "nofile_at_least": None}
    least = wanted.model_copy(update={"limits": wanted.limits.model_copy(update=update)})
    facts = limits(memlock=found, stack=1, nofile=1)(ready)
    assert [finding.wanted for finding in check_host(least, facts)] == said


def test_without_an_engine_its_runtimes_are_not_known(wanted: Wanted, ready: HostFacts) -> None:
    verdict = examine(wanted, part("docker", engine=UNREAD)(ready))
    assert [finding.code for finding in verdict.findings] == ["HOST-DOCKER-ENGINE"]
    assert [skip.check for skip in verdict.skipped] == ["HOST-DOCKER-TOOLKIT"]
