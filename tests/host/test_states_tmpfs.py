"""The tmpfs through which states pass: there, of the live size, the run user's, back at boot."""

import pytest
from testinfra.host import Host

from pipeline.host.wanted import Wanted, WantedTmpfs
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state


@pytest.fixture
def asked(wanted: Wanted) -> WantedTmpfs:
    if wanted.states_tmpfs is None:
        pytest.skip("states_tmpfs: not wanted")
    return wanted.states_tmpfs


def test_it_is_mounted(host: Host, asked: WantedTmpfs) -> None:
    found = _mounted(host, asked)
    if found is None:
        refuse(
            "HOST-TMPFS-MISSING",
            f"no tmpfs of its own at {asked.path}",
            wanted=f"one of {asked.bytes} bytes",
            next_step=by_role("states_tmpfs"),
        )


def test_its_live_size_is_the_wanted_one(host: Host, asked: WantedTmpfs) -> None:
    found = _mounted(host, asked)
    if found is None:
        pytest.skip(f"no tmpfs at {asked.path}: another test says so")
    if found != asked.bytes:
        refuse(
            "HOST-TMPFS-SIZE",
            f"{asked.path} has {found} bytes",
            wanted=f"{asked.bytes}",
            next_step=by_role("states_tmpfs")
            + f", or: mount -o remount,size={asked.bytes} {asked.path}",
        )


def test_it_is_mounted_once(host: Host, asked: WantedTmpfs) -> None:
    """A second mount over it hides states and keeps their memory."""
    mounts = host.check_output("cut -d' ' -f2 /proc/mounts").splitlines()
    if mounts.count(str(asked.path)) > 1:
        refuse(
            "HOST-TMPFS-SIZE",
            f"{asked.path} is mounted {mounts.count(str(asked.path))} times, one over the other",
            wanted="once",
            next_step=f"umount {asked.path}, until one is left",
        )


def test_it_comes_back_at_boot(host: Host, asked: WantedTmpfs) -> None:
    unit = host.check_output("systemd-escape --path --suffix=mount %s", str(asked.path))
    state = host.run("systemctl is-enabled %s", unit).stdout.strip()
    # generated: from a line of fstab.
    if state not in ("enabled", "static", "generated"):
        refuse(
            "HOST-TMPFS-MISSING",
            f"{unit} is {state or 'not there'}: the tmpfs is gone after the next boot",
            wanted="enabled",
            next_step=by_role("states_tmpfs"),
        )


def test_it_is_the_run_user_s(host: Host, asked: WantedTmpfs, wanted: Wanted) -> None:
    if wanted.run_user is None:
        pytest.skip("run_user: not wanted")
    if _mounted(host, asked) is None:
        pytest.skip(f"no tmpfs at {asked.path}: another test says so")
    uid, mode = host.check_output("stat --format '%%u %%a' %s", str(asked.path)).split()
    if int(uid) != wanted.run_user.uid or int(mode, 8) & 0o022:
        refuse(
            "HOST-TMPFS-OWNER",
            f"{asked.path} is of user {uid}, mode {mode}",
            wanted=f"user {wanted.run_user.uid}, written by nobody else",
            next_step=by_role("states_tmpfs"),
        )


def _mounted(host: Host, asked: WantedTmpfs) -> int | None:
    """Live bytes of the tmpfs mounted at the path itself; None without one."""
    # df, not findmnt: of mounts that are stacked it asks the one that is seen.
    done = host.run("df --block-size=1 --output=target,fstype,size %s", str(asked.path))
    if done.rc != 0:
        return None
    target, kind, size = done.stdout.splitlines()[-1].split()
    return int(size) if target == str(asked.path) and kind == "tmpfs" else None
