"""A systemd container that stands for a fresh server, to run the real playbook against.

Debian from docker/base with systemd as process 1, package repositories by `file:` (repository.py),
no network, no GPU, never privileged. It shares the kernel: what the playbook writes below
/proc/sys is this machine's own, and is put back at the end.

    python -m tests.host_ci.machine        start one, say how to reach it, remove it at Enter
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.host_ci.repository import KEY, build_repositories

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "docker" / "base" / "build.sh"
LISTS = (ROOT / "docker/base/packages.txt", ROOT / "docker/base/packages-host.txt")
READY_HOST = ROOT / "ansible" / "group_vars" / "gpu_hosts.yml"
OWNER = "cleanslate.host-ci"  # label: process that started the container
SERVED = "/srv/apt"
STATES_BYTES = 64 << 20  # a CI machine has no 192 GiB
FLAGS = (
    *("--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN"),
    *("--security-opt", "seccomp=unconfined", "--security-opt", "systempaths=unconfined"),
    *("--security-opt", "apparmor=unconfined"),
    *("--cgroupns=host", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup:rw"),
    *("--tmpfs", "/run", "--tmpfs", "/run/lock", "--env", "container=docker"),
    *("--network", "none", "--volume", "/var/lib/docker", "--stop-signal", "SIGRTMIN+3"),
)
# Debian's own sysctl drop-ins are for its kernel, not for the one of this machine.
INIT = """
for file in /usr/lib/sysctl.d/*.conf; do
  ln -sf /dev/null "/etc/sysctl.d/${file##*/}"
done
rm -f /etc/apt/sources.list.d/*.list
touch /boot/vmlinuz-6.1.0-0-simulated /boot/vmlinuz-6.1.0-9-simulated
exec /sbin/init
"""
# As a server has it: Debian's packages from a mirror whose key is known.
SOURCES = f"""Types: deb
URIs: file:{SERVED}/debian file:{SERVED}/kernel
Suites: ./
Signed-By: {SERVED}/{KEY}
"""


@dataclass(frozen=True)
class Machine:
    """A running container. folder: inventory.yml, ready_host.yml and variables.yml for it."""

    name: str
    folder: Path

    @property
    def inventory(self) -> Path:
        """The inventory that has this machine as its only GPU host."""
        return self.folder / "inventory.yml"

    @property
    def variables(self) -> Path:
        """What to give as `--extra-vars @file`: ready_host of this machine, and `simulated`."""
        return self.folder / "variables.yml"

    @property
    def url(self) -> str:
        """For testinfra."""
        return f"docker://{self.name}"

    def run(self, *command: str) -> str:
        """What a command in the container prints."""
        return docker("exec", self.name, *command)

    def restart(self) -> None:
        """As near to a reboot as a container comes: all processes and mounts begin anew."""
        docker("restart", "--time", "20", self.name)
        wait_for_init(self.name)


def docker(*arguments: str) -> str:
    """What a docker command prints; its complaint is in the error."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr or done.stdout}"
    return done.stdout.strip()


def image() -> str:
    """Tag of the base image with systemd; built (a minute) where the lists have changed."""
    inputs = hashlib.sha256(b"".join(path.read_bytes() for path in (BUILD, *LISTS))).hexdigest()
    tag = f"cleanslate-host:{inputs[:12]}"
    if subprocess.run(["docker", "image", "inspect", tag], capture_output=True).returncode != 0:
        command = ["bash", str(BUILD), *map(str, LISTS)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        docker("tag", done.stdout.split()[0], tag)
    return tag


def ready_host(debian: dict[str, str], hard: dict[str, int | None]) -> dict[str, Any]:
    """ready_host as the repository has it, but for what this machine cannot have.

    debian: package -> version that Debian's mirror has now; which one that is changes.
    hard: resource limits that the container cannot raise, None where there is none.
    """
    value: dict[str, Any] = yaml.safe_load(READY_HOST.read_text(encoding="utf-8"))["ready_host"]
    value["states_tmpfs"]["bytes"] = STATES_BYTES
    packages = value["containers"]["packages"]
    packages.update({name: debian[name] for name in packages.keys() & debian.keys()})
    limits = value["limits"]
    if (most := hard["memlock"]) is not None:
        limits["memlock"] = most
    if (most := hard["nofile"]) is not None:
        limits["nofile_at_least"] = min(limits["nofile_at_least"], most)
    return value


def hard_limits(base: str) -> dict[str, int | None]:
    """memlock in bytes and nofile: the most that a container gets here."""
    said = docker("run", "--rm", base, "sh", "-c", "ulimit -H -l; ulimit -H -n").split()
    memlock, nofile = (None if one == "unlimited" else int(one) for one in said)
    return {"memlock": None if memlock is None else memlock * 1024, "nofile": nofile}


def wanted_packages() -> dict[str, str]:
    """Package -> version that ready_host wants."""
    value = yaml.safe_load(READY_HOST.read_text(encoding="utf-8"))["ready_host"]
    return {**value["driver"]["packages"], **value["containers"]["packages"]}


def variables(served: Path, ready: dict[str, Any]) -> dict[str, Any]:
    """Extra variables of the playbook: where its repositories are, and what is ready here."""
    key = (served / KEY).read_text()
    sha256 = hashlib.sha256(key.encode()).hexdigest()
    given: dict[str, Any] = {"simulated": True, "ready_host": ready}
    for role, repository in (("nvidia_driver", "driver"), ("container_runtime", "toolkit")):
        given |= {
            f"{role}_repository_uri": f"file:{SERVED}/{repository}",
            f"{role}_repository_suite": "./",
            f"{role}_repository_key": key,
            f"{role}_repository_key_sha256": sha256,
        }
    return given


def wait_for_init(name: str, *, seconds: float = 60.0) -> None:
    """Returns when systemd has started all that it starts; says which units failed."""
    command = ["docker", "exec", name, "systemctl", "is-system-running", "--wait"]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
        if (state := done.stdout.strip()) == "running":
            return
        if state == "degraded":
            failed = docker("exec", name, "systemctl", "--failed", "--no-legend", "--plain")
            raise AssertionError(f"{name}: units failed: {failed}")
        time.sleep(0.2)
    raise AssertionError(f"{name}: systemd is not up after {seconds:.0f} s: {docker('logs', name)}")


def remove_left_behind() -> None:
    """Removes containers whose starter is dead: it was killed before it could."""
    listed = docker(
        "ps",
        "--all",
        "--filter",
        f"label={OWNER}",
        "--format",
        f'{{{{.ID}}}} {{{{.Label "{OWNER}"}}}}',
    )
    for line in listed.splitlines():
        container, _, owner = line.partition(" ")
        if not Path("/proc", owner).exists():
            docker("rm", "--force", "--volumes", container)


@contextmanager
def alone() -> Iterator[None]:
    """Waits until no other machine runs here: two would each take the other's settings for ours."""
    with Path(tempfile.gettempdir(), "cleanslate-host-ci.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def kernel_settings_kept(names: tuple[str, ...]) -> Iterator[None]:
    """Puts settings of this machine's kernel back at the end."""
    paths = [Path("/proc/sys", *name.split(".")) for name in names]
    before = {path: path.read_text() for path in paths if path.is_file()}
    try:
        yield
    finally:
        for path, value in before.items():
            if path.read_text() != value:
                path.write_text(value)


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """A fresh server in a container, removed at the end. folder: an empty one, for its files."""
    name = f"cleanslate-host-{os.getpid()}"
    (served := folder / "apt").mkdir()
    with ExitStack() as stack:
        stack.enter_context(alone())
        remove_left_behind()
        base = image()
        docker(
            *("create", "--name", name, "--hostname", "ready", "--label", f"{OWNER}={os.getpid()}"),
            *(*FLAGS, "--volume", f"{served}:{SERVED}:ro", base, "/bin/sh", "-ec", INIT),
        )
        stack.callback(docker, "rm", "--force", "--volumes", name)
        docker("cp", f"{name}:/var/lib/dpkg/status", str(folder / "status"))
        debian = build_repositories(served, wanted=wanted_packages(), status=folder / "status")
        (folder / "sources").write_text(SOURCES)
        docker("cp", str(folder / "sources"), f"{name}:/etc/apt/sources.list.d/debian.sources")
        given = variables(served, ready_host(debian, hard_limits(base)))
        (folder / "variables.yml").write_text(yaml.safe_dump(given))
        (folder / "inventory.yml").write_text(json.dumps(inventory(name)))
        # Alone, as testinfra and preflight read it.
        text = yaml.safe_dump({"ready_host": given["ready_host"]})
        (folder / "ready_host.yml").write_text(text)
        stack.enter_context(kernel_settings_kept(tuple(given["ready_host"]["sysctl"])))
        docker("start", name)
        wait_for_init(name)
        yield Machine(name, folder)


def inventory(name: str) -> dict[str, Any]:
    """An inventory with one GPU host, reached by `docker exec`."""
    host = {
        "ansible_connection": "community.docker.docker",
        "ansible_host": name,
        "ansible_user": "root",
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    return {"gpu_hosts": {"hosts": {name: host}}}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="cs-host-") as scratch, machine(Path(scratch)) as one:
        sys.stdout.write(
            f"testinfra  {one.url}  --host-wanted {one.folder}/ready_host.yml\n"
            f"ansible-playbook -i {one.inventory} -e @{one.variables} ansible/site.yml\n"
            "Enter removes it.\n"
        )
        sys.stdout.flush()
        sys.stdin.readline()
