"""The real playbook against a systemd container: it makes a host ready, keeps it, and repairs it.

SIMULATED: NVIDIA's packages, and whatever takes hardware or a kernel of one's own. Real: systemd,
apt and its signatures, Docker's engine, logind, the mounts, the limits. The tests are one story and
run in their order.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.host_ci.machine import Machine
from tests.host_ci.playbook import Played, play, prove

pytestmark = pytest.mark.host
# Of every file of /etc and of what dpkg knows; apt's lists may be new after check mode.
_STATE = "find /etc /var/lib/dpkg/status -type f -exec sha256sum {} + | sort | sha256sum"


@dataclass(frozen=True)
class Drift:
    """What somebody does to a ready host, and the code that has to name it, by which test file."""

    code: str
    file: str
    command: str


DRIFTS = {
    "the tmpfs is remounted smaller": Drift(
        "HOST-TMPFS-SIZE", "test_states_tmpfs.py", "mount -o remount,size=32M /mnt/hs"
    ),
    "a sysctl is changed": Drift(
        "HOST-SYSCTL", "test_sysctl.py", "echo 60 >/proc/sys/vm/swappiness"
    ),
    "daemon.json is edited": Drift(
        "HOST-DOCKER-DAEMON",
        "test_docker.py",
        """echo '{"log-driver": "local"}' >/etc/docker/daemon.json""",
    ),
    "a package is no longer held": Drift(
        "HOST-DRIVER-HELD", "test_driver.py", "apt-mark unhold nvidia-open"
    ),
    "logind wipes shared memory": Drift(
        "HOST-SHM-REMOVEIPC",
        "test_shm.py",
        "sed -i s/RemoveIPC=no/RemoveIPC=yes/ /etc/systemd/logind.conf.d/zz-cleanslate.conf && "
        "systemctl restart systemd-logind",
    ),
    "NCCL's variables are edited": Drift(
        "HOST-NCCL-PROFILE",
        "test_nccl.py",
        """echo '{"extraction": {}, "training": {}}' >/etc/cleanslate/nccl.json""",
    ),
}


@pytest.fixture(scope="module")
def rehearsed(fresh: Machine) -> tuple[Played, str, str]:
    """Check mode on the fresh machine, and its state before and after."""
    before = fresh.run("sh", "-c", _STATE)
    return play(fresh, "--check", "--diff"), before, fresh.run("sh", "-c", _STATE)


@pytest.fixture(scope="module")
def ready(fresh: Machine, rehearsed: tuple[Played, str, str]) -> Machine:
    """The machine, converged."""
    played = play(fresh)
    assert played.rc == 0, played.end
    assert played.changed
    return fresh


def test_check_mode_runs_through_on_a_fresh_machine(rehearsed: tuple[Played, str, str]) -> None:
    played, _, _ = rehearsed
    assert played.rc == 0, played.end
    assert played.changed


def test_check_mode_changes_nothing(rehearsed: tuple[Played, str, str]) -> None:
    _, before, after = rehearsed
    assert before == after


def test_a_second_run_changes_nothing(ready: Machine) -> None:
    played = play(ready)
    assert played.rc == 0, played.end
    assert played.changes == []
    assert played.changed == 0


def test_check_mode_finds_nothing_to_do_afterwards(ready: Machine) -> None:
    played = play(ready, "--check", "--diff")
    assert played.rc == 0, played.end
    assert played.changes == []
    assert "\n+++ " not in played.output


def test_testinfra_finds_the_host_ready(ready: Machine) -> None:
    proved = prove(ready)
    assert proved.refusals == {}
    assert proved.rc == 0, proved.output
    assert re.search(rf"^\d+ hardware checks skipped: no NVIDIA GPU on {ready.url}$",
                     proved.output, re.MULTILINE)  # fmt: skip


def test_it_is_ready_after_a_restart(ready: Machine) -> None:
    ready.run("sh", "-c", "echo 60 >/proc/sys/vm/swappiness")  # as the next kernel would start
    ready.restart()
    assert prove(ready).refusals == {}


def test_a_unit_sets_the_gpus_at_boot(ready: Machine) -> None:
    asked = ready.run("cat", "/run/nvidia-smi.simulated").splitlines()
    assert "--power-limit=600" in asked
    assert "--multi-instance-gpu=0" in asked


@pytest.mark.parametrize("drift", DRIFTS.values(), ids=DRIFTS.keys())
def test_drift_is_named_and_repaired_as_the_message_says(ready: Machine, drift: Drift) -> None:
    ready.run("sh", "-ec", drift.command)
    named = prove(ready).refusals
    assert list(named) == [drift.code]

    tags = re.search(r"next:.*--tags (\w+)", named[drift.code])
    assert tags, named
    repaired = play(ready, "--tags", tags[1])
    assert repaired.rc == 0, repaired.end
    assert repaired.changed
    assert prove(ready, f"tests/host/{drift.file}").refusals == {}


def test_testinfra_finds_all_of_it_repaired(ready: Machine) -> None:
    assert prove(ready).refusals == {}


def test_a_wrong_key_is_refused(ready: Machine) -> None:
    """The key is what was said it is, or no package list is believed."""
    wrong = "nvidia_driver_repository_key_sha256=" + "0" * 64
    played = play(ready, "--tags", "nvidia_driver", "--extra-vars", wrong)
    assert played.rc != 0
    assert "sha256" in played.output


@pytest.fixture
def shared() -> Iterator[str]:
    """A folder for ssh's socket, whose path may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="cs-ssh-", ignore_cleanup_errors=True) as folder:
        yield folder


def test_the_suite_asks_over_ssh_too(ready: Machine, tmp_path: Path, shared: str) -> None:
    """A real sshd of the machine, which has no network: its pipe is a `docker exec`."""
    ready.run("sh", "-ec", "apt-get -qq install -y openssh-server >&2; mkdir -p /run/sshd")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True
    )
    public = (tmp_path / "key.pub").read_text().strip()
    ready.run(
        "sh", "-ec", f"umask 77; mkdir -p /root/.ssh; echo '{public}' >/root/.ssh/authorized_keys"
    )
    known = ready.run("cat", "/etc/ssh/ssh_host_ed25519_key.pub")
    (tmp_path / "known_hosts").write_text(f"ready {known}\n")
    (tmp_path / "config").write_text(
        f"Host ready\nUser root\nIdentityFile {tmp_path}/key\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {tmp_path}/known_hosts\nStrictHostKeyChecking yes\n"
        f"ProxyCommand docker exec -i {ready.name} /usr/sbin/sshd -i\nControlPath {shared}/%C\n"
    )
    proved = prove(ready, url="ssh://ready", options=(f"--ssh-config={tmp_path}/config",))
    assert proved.refusals == {}
    assert proved.rc == 0, proved.output
    assert " hardware checks skipped: no NVIDIA GPU on ssh://ready" in proved.output
