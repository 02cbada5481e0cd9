"""Shared memory of processes: room, and nobody who wipes it at logout."""

import pytest
from testinfra.host import Host

from pipeline.host.wanted import Wanted
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state
_LEAST_BYTES = 1 << 30  # Docker's default of 64 MiB is too little for NCCL (nccl#290)
_LOGIND = "org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager"


@pytest.mark.usefixtures("own_kernel")
def test_dev_shm_has_room(host: Host) -> None:
    size = int(host.check_output("df --block-size=1 --output=size /dev/shm").split()[-1])
    if size < _LEAST_BYTES:
        refuse(
            "HOST-SHM-SIZE",
            f"/dev/shm has {size} bytes",  # noqa: S108  a name, not a file
            wanted=f"{_LEAST_BYTES} or more",
            next_step="mount -o remount,size=50% /dev/shm; in a container: ipc host or shm_size",
        )


def test_logind_keeps_shared_memory_at_logout(host: Host, wanted: Wanted) -> None:
    _want_logind(wanted)
    live = host.run(f"busctl get-property {_LOGIND} RemoveIPC")
    if live.rc != 0:
        pytest.skip("no systemd-logind answers")
    if live.stdout.strip() != "b false":
        _refuse("systemd-logind runs with RemoveIPC=yes")


def test_logind_keeps_it_after_the_next_boot(host: Host, wanted: Wanted) -> None:
    _want_logind(wanted)
    done = host.run("systemd-analyze cat-config systemd/logind.conf")
    set_to = [
        line.partition("=")[2].strip().lower()
        for line in done.stdout.splitlines()
        if line.strip().startswith("RemoveIPC=")
    ]
    # systemd's own default is yes; the last line wins.
    if done.rc == 0 and (set_to or ["yes"])[-1] not in ("no", "false", "0", "off"):
        _refuse("systemd's configuration has RemoveIPC=yes")


def _want_logind(wanted: Wanted) -> None:
    if wanted.logind is None or wanted.logind.remove_ipc is None:
        pytest.skip("logind.remove_ipc: not wanted")


def _refuse(found: str) -> None:
    refuse(
        "HOST-SHM-REMOVEIPC",
        found,
        wanted="RemoveIPC=no: /dev/shm of a user is wiped at logout, under running jobs",
        next_step=by_role("states_tmpfs"),
    )
