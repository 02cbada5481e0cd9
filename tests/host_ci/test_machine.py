"""The container that stands for a server leaves nothing behind, however its user ends."""

from pathlib import Path

import pytest

from tests.host_ci.machine import (
    FLAGS,
    OWNER,
    docker,
    image,
    kernel_settings_kept,
    machine,
    remove_left_behind,
)

pytestmark = pytest.mark.host
SWAPPINESS = Path("/proc/sys/vm/swappiness")


def test_it_is_never_privileged() -> None:
    assert "--privileged" not in FLAGS


def test_it_is_removed_after_a_failure(tmp_path: Path) -> None:
    before = SWAPPINESS.read_text()
    volumes = docker("volume", "ls", "--quiet")

    def fail() -> None:
        with machine(tmp_path) as one:
            names.append(one.name)
            one.run("sh", "-c", "echo 61 >/proc/sys/vm/swappiness")
            raise RuntimeError("a test failed")

    names: list[str] = []
    with pytest.raises(RuntimeError, match="a test failed"):
        fail()
    assert docker("ps", "--all", "--quiet", "--filter", f"name={names[0]}") == ""
    assert docker("volume", "ls", "--quiet") == volumes
    assert SWAPPINESS.read_text() == before


def test_one_whose_starter_was_killed_is_removed_by_the_next() -> None:
    dead, alive = "999999999", "1"
    made = [docker("create", "--label", f"{OWNER}={pid}", image()) for pid in (dead, alive)]
    try:
        remove_left_behind()
        listed = docker("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={OWNER}")
        assert made[0] not in listed
        assert made[1] in listed
    finally:
        docker("rm", "--force", *made)


def test_a_setting_of_this_machine_s_kernel_is_put_back() -> None:
    before = SWAPPINESS.read_text()
    with kernel_settings_kept(("vm.swappiness", "kernel.absent")):
        SWAPPINESS.write_text("61" if before.strip() != "61" else "62")
    assert SWAPPINESS.read_text() == before
