from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.host.errors import HostError
from pipeline.host.wanted import Wanted, read_wanted

Edit = Callable[..., Path]


def test_the_shipped_file_describes_eight_gpus_and_a_tmpfs(shipped: Path) -> None:
    wanted = read_wanted(shipped)
    assert wanted.gpus
    assert wanted.states_tmpfs
    assert (wanted.gpus.count, wanted.gpus.memory_mib) == (8, 97887)
    assert (str(wanted.states_tmpfs.path), wanted.states_tmpfs.bytes) == ("/mnt/hs", 192 << 30)


def test_packages_of_driver_and_containers_are_one_list(shipped: Path) -> None:
    names = read_wanted(shipped).packages
    assert {"nvidia-open", "docker.io", "nvidia-container-toolkit"} <= names.keys()


def test_a_package_with_two_versions_is_refused(edited: Edit) -> None:
    with pytest.raises(HostError, match="two versions of docker"):
        read_wanted(edited("driver/packages/docker.io='1.2'"))


@pytest.mark.parametrize("section", list(Wanted.model_fields))
def test_a_section_may_be_null_but_not_left_out(edited: Edit, section: str) -> None:
    assert getattr(read_wanted(edited(f"{section}=null")), section) is None
    with pytest.raises(HostError, match=f"ready_host.{section}"):
        read_wanted(edited(f"{section}=absent"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("gpus/nmae=x", "ready_host.gpus.nmae"),
        ("gpus/count='8'", "valid integer"),
        ("gpus/power_limit_watts=absent", "ready_host.gpus.power_limit_watts"),
        ("gpus/mig=enabled", "ready_host.gpus.mig"),
        ("driver/packages/nvidia-open=latest", "nvidia-open"),
        ("kernel/command_line=['iommu=pt quiet']", "command_line.0"),
        ("states_tmpfs/bytes=206158430209", "206158434304 is"),
        ("states_tmpfs/bytes=192G", "valid integer"),
        ("states_tmpfs/path=mnt/hs", "absolute path"),
        ("states_tmpfs/path=/mnt/../dev", "absolute path"),
        ("states_tmpfs/path=/dev/shm", "a mount point of its own"),
        ("run_user/directories=[/srv]", "two levels deep"),
        ("run_user/uid=0", "ready_host.run_user.uid"),
        ("logind/remove_ipc=true", "ready_host.logind.remove_ipc"),
        ("nccl/training/nccl_proto=LL", "ready_host.nccl.training"),
        ("states_tmpfs/path='{{ where }}'", "states_tmpfs.path is an Ansible template"),
        ("kernel/command_line=['{% if x %}']", "kernel.command_line.0 is an Ansible template"),
        ("sysctl/vm.swappiness=2026-01-01", "JSON"),
        ("containers/daemon={mtu: .inf}", "JSON"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(edited: Edit, change: str, said: str) -> None:
    with pytest.raises(HostError) as refused:
        read_wanted(edited(change))
    assert said in str(refused.value)
    assert "hosts.yml" in refused.value.found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ready_host: {gpus: null, gpus: null}", "stands twice"),
        ("ready_host: !vault x", "vault"),
        ("ready_hosts: {}", "no mapping ready_host"),
        ("[]", "no mapping ready_host"),
        ("ready_host: [", "hosts.yml"),
    ],
)
def test_a_file_that_is_no_such_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hosts.yml").write_text(text)
    with pytest.raises(HostError, match=said):
        read_wanted(tmp_path / "hosts.yml")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"none\.yml"):
        read_wanted(tmp_path / "none.yml")


def test_an_absent_key_is_named_without_the_section_around_it(edited: Edit) -> None:
    with pytest.raises(HostError) as refused:
        read_wanted(edited("gpus/count=absent"))
    assert refused.value.found.endswith("hosts.yml: ready_host.gpus.count")


def test_what_is_wanted_is_not_changed_in_passing(shipped: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read_wanted(shipped).governor = "powersave"  # type: ignore[misc]


def test_other_variables_of_the_file_are_left_to_ansible(edited: Edit) -> None:
    path = edited()
    path.write_text(path.read_text() + "\nnvidia_driver_repository_uri: '{{ mirror }}'\n")
    assert read_wanted(path).gpus
