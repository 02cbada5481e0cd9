import pytest

from pipeline.host.codes import CODES, HARDWARE, OUT_OF_SIGHT, codes_of_stage
from pipeline.host.finding import Finding, Notes, Scope, Skip, Verdict

FAULT = Finding("HOST-SYSCTL", "60", "0", "set it", "vm.swappiness")


def test_a_host_without_findings_is_ready() -> None:
    assert Verdict().ready
    assert not Verdict((FAULT,)).ready


@pytest.mark.parametrize(("code", "ready"), [("HOST-KERNEL-ACS", False), ("HOST-USER", True)])
def test_a_hardware_check_that_was_not_made_is_no_pass(code: str, ready: bool) -> None:
    skip = Skip(code, "as nobody")
    assert skip.hardware is not ready
    assert Verdict((), (skip,)).ready is ready


def test_what_is_out_of_the_scope_is_dropped() -> None:
    notes = Notes(Scope(frozenset({"HOST-SYSCTL"})))
    notes.fault("HOST-LIMITS", "nofile", "1", wanted="2", next_step="raise it")
    notes.skip("HOST-USER", "no getent")
    assert notes.verdict == Verdict()


@pytest.mark.parametrize("code", sorted(OUT_OF_SIGHT))
def test_in_a_container_the_hosts_own_is_not_judged(code: str) -> None:
    assert not Scope(container=True).wants(code)
    assert Scope().wants(code)


def test_a_containers_own_tmpfs_packages_users_and_files_say_nothing_of_the_host() -> None:
    assert {code.split("-")[1] for code in OUT_OF_SIGHT} == {
        "TMPFS", "SHM", "KERNEL", "DRIVER", "DOCKER", "USER", "NCCL",
    }  # fmt: skip
    assert not OUT_OF_SIGHT & {"HOST-SHM-SIZE", "HOST-KERNEL-ACS", "HOST-DRIVER-BRANCH"}


def test_gpus_of_one_fault_are_one_finding() -> None:
    notes = Notes(Scope())
    for index, watts in enumerate((300, 450, 300)):
        notes.fault("HOST-GPU-POWER", f"GPU {index}", f"{watts} W", wanted="600", next_step="set")
    assert [(one.subject, one.found) for one in notes.verdict.findings] == [
        ("GPUs 0, 2", "300 W"), ("GPU 1", "450 W"),
    ]  # fmt: skip


def test_a_skip_stands_there_once() -> None:
    notes = Notes(Scope())
    notes.skip(("HOST-USER", "HOST-USER"), "no getent")
    assert len(notes.verdict.skipped) == 1


def test_every_code_has_its_area_and_a_sentence() -> None:
    assert all(code.startswith("HOST-") and sentence for code, sentence in CODES.items())
    assert CODES.keys() >= HARDWARE | OUT_OF_SIGHT


def test_a_stage_without_gpus_asks_for_nothing_but_the_tmpfs_of_extract() -> None:
    assert codes_of_stage("train", gpus=False) == frozenset()
    tmpfs = codes_of_stage("extract", gpus=False)
    assert {code.split("-")[1] for code in tmpfs} == {"TMPFS", "SHM"}
    assert tmpfs < codes_of_stage("extract", gpus=True)


@pytest.mark.parametrize("stage", ["prepare", "extract", "train", "evaluate", "serve"])
def test_the_file_of_nccls_variables_stops_no_stage_that_takes_others(stage: str) -> None:
    assert "HOST-NCCL-PROFILE" not in codes_of_stage(stage, gpus=True)


def test_what_only_the_next_boot_meets_stops_no_stage() -> None:
    later = {"HOST-KERNEL-HEADERS", "HOST-KERNEL-DKMS", "HOST-DRIVER-HELD", "HOST-DOCKER-DAEMON"}
    assert not codes_of_stage("extract", gpus=True) & later
    assert {"HOST-KERNEL-ACS", "HOST-GPU-HELD"} <= codes_of_stage("train", gpus=True)
