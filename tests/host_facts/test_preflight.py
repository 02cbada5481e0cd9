import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.host.codes import CODES
from pipeline.host.errors import HostError
from pipeline.host.finding import Finding, Skip, Verdict
from pipeline.host.gather import HostFacts
from pipeline.host.preflight import Preflight, preflight, refuse_unready, scope_of

Edit = Callable[..., Path]
MOUNTS = {"/proc/self/mounts": "", "/proc/sys/vm/swappiness": "60\n"}
FINDING = Finding("HOST-SYSCTL", "60", "0", "set it", "vm.swappiness")
SKIPS = (Skip("HOST-KERNEL-ACS", "as nobody"), Skip("HOST-GPU-XID", "as nobody"))


def test_people_are_told_each_finding_with_what_to_do_and_the_sum() -> None:
    told = list(Preflight(Verdict((FINDING,), SKIPS), HostFacts()).lines())
    assert told == [
        "HOST-SYSCTL  vm.swappiness: 60",
        "    wanted: 0",
        "    next:   set it",
        "not checked  HOST-KERNEL-ACS, HOST-GPU-XID: as nobody",
        "not ready: 1 found, 2 hardware checks not made",
    ]


@pytest.mark.parametrize(
    ("verdict", "last"),
    [
        (Verdict(), "ready"),
        (Verdict((), (Skip("HOST-USER", "no getent"),)), "ready"),
        (Verdict((), SKIPS[:1]), "not ready: 1 hardware checks not made"),
        (Verdict((FINDING,)), "not ready: 1 found"),
    ],
)
def test_the_last_line_is_the_verdict(verdict: Verdict, last: str) -> None:
    told = Preflight(verdict, HostFacts())
    assert list(told.lines())[-1] == last
    assert json.loads(told.as_json())["ready"] is (last == "ready")


def test_machines_are_told_with_stable_keys(ready: HostFacts) -> None:
    value = json.loads(Preflight(Verdict((FINDING,), SKIPS), ready).as_json())
    assert list(value) == ["ready", "findings", "skipped", "facts"]
    assert value["findings"] == [
        {"code": "HOST-SYSCTL", "found": "60", "wanted": "0", "next_step": "set it",
         "subject": "vm.swappiness"}
    ]  # fmt: skip
    assert value["skipped"][0] == {
        "check": "HOST-KERNEL-ACS", "reason": "as nobody", "hardware": True,
    }  # fmt: skip
    assert value["facts"]["gpus"]["gpus"][0]["bar1_mib"] == 131072
    assert value["facts"]["tmpfs"]["room"]["bytes"] == 192 << 30


def test_without_a_stage_the_whole_host_is_looked_at() -> None:
    assert scope_of("", gpus=(0,), shm_bytes=None).codes == frozenset(CODES)
    assert scope_of("", gpus=(0,), shm_bytes=None).gpus is None


def test_a_stage_whose_gpus_are_not_said_has_all_of_them() -> None:
    scope = scope_of("train", gpus=None, shm_bytes=None)
    assert "HOST-GPU-HELD" in scope.codes
    assert scope.gpus is None
    assert scope_of("train", gpus=(), shm_bytes=None).codes == frozenset()
    assert scope_of("train", gpus=(2, 3), shm_bytes=1).gpus == (2, 3)


def test_a_host_is_read_and_judged(recorded: Callable, shipped: Path) -> None:
    scope = scope_of("extract", gpus=(), shm_bytes=None)
    found = preflight(shipped, scope, reader=recorded(MOUNTS)).verdict
    assert [finding.code for finding in found.findings] == [
        "HOST-TMPFS-MISSING", "HOST-SHM-REMOVEIPC",
    ]  # fmt: skip


def test_a_stage_is_refused_with_every_finding_in_one_fault(
    recorded: Callable, shipped: Path
) -> None:
    scope = scope_of("extract", gpus=(), shm_bytes=None)
    with pytest.raises(HostError) as refused:
        refuse_unready(shipped, scope, reader=recorded(MOUNTS))
    for code in ("HOST-TMPFS-MISSING /mnt/hs", "HOST-SHM-REMOVEIPC logind"):
        assert code in refused.value.found
    assert "206158430208 bytes" in refused.value.wanted
    assert "states_tmpfs" in refused.value.next_step


def test_a_stage_that_is_let_through_is_told_what_was_not_checked(
    recorded: Callable, edited: Edit
) -> None:
    path = edited("states_tmpfs=null")
    logind = {"/etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}
    scope = scope_of("extract", gpus=(), shm_bytes=None)
    said = refuse_unready(path, scope, reader=recorded(logind))
    assert said.startswith("host: nothing stands in the way; not checked: HOST-SHM-REMOVEIPC (")


def test_a_stage_that_needs_nothing_reads_nothing(tmp_path: Path) -> None:
    scope = scope_of("report", gpus=(), shm_bytes=None)
    said = refuse_unready(tmp_path / "absent.yml", scope)
    assert said == "host: nothing of it concerns this stage"


def test_a_stages_own_limits_count_whoever_starts_it(recorded: Callable, edited: Edit) -> None:
    names = ("Max locked memory", "Max stack size", "Max open files")
    text = "".join(f"{name:<26}1024                 unlimited            x\n" for name in names)
    scope = replace(scope_of("train", gpus=(0,), shm_bytes=None), codes=frozenset({"HOST-LIMITS"}))
    with pytest.raises(HostError, match="HOST-LIMITS memlock of"):
        refuse_unready(edited(), scope, reader=recorded({"/proc/self/limits": text}))
