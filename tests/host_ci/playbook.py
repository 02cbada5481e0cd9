"""Runs the real playbook and the real testinfra suite against a machine, reads what they say."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

from tests.host_ci.machine import ROOT, Machine

_ANSIBLE = ROOT / "ansible"
_RECAP = re.compile(
    r"^\S+\s*: ok=(?P<ok>\d+)\s+changed=(?P<changed>\d+)\s+unreachable=(?P<unreachable>\d+)\s+"
    r"failed=(?P<failed>\d+)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Played:
    """One run of ansible-playbook. output: all it printed."""

    rc: int
    output: str

    @property
    def changed(self) -> int | None:
        """Tasks that changed something; None where the run got to no recap."""
        found = _RECAP.search(self.output)
        return int(found["changed"]) if found else None

    @property
    def changes(self) -> list[str]:
        """Names of the tasks that changed something, or would have."""
        names, task = [], ""
        for line in self.output.splitlines():
            if found := re.match(r"(?:TASK|RUNNING HANDLER) \[(.*)\]", line):
                task = found[1]
            elif line.startswith("changed: "):
                names.append(task)
        return names

    @property
    def end(self) -> str:
        """Its last lines, for a message."""
        return self.output[-4000:]


@dataclass(frozen=True)
class Proved:
    """One run of tests/host. refusals: code -> the whole line."""

    rc: int
    output: str

    @property
    def refusals(self) -> dict[str, str]:
        """Code -> what was said, of each failure."""
        lines = (line for line in self.output.splitlines() if line.startswith("HOST-"))
        return {line.partition(":")[0]: line for line in lines}


def program(name: str) -> str:
    """Path of a program of Ansible: of its own virtual environment here, else of PATH."""
    beside = ROOT / ".venv-ansible" / "bin"
    found = shutil.which(name, path=str(beside)) or shutil.which(name)
    assert found, f"no {name}: make ansible"
    return found


def play(machine: Machine, *options: str) -> Played:
    """Runs ansible/site.yml with the machine's inventory and variables."""
    command = [
        *(program("ansible-playbook"), "site.yml", "--inventory", str(machine.inventory)),
        *("--extra-vars", f"@{machine.variables}", *options),
    ]
    environment = {
        **os.environ,  # noqa: TID251
        "ANSIBLE_HOME": str(machine.folder / "ansible"),
        "ANSIBLE_CONFIG": str(_ANSIBLE / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_PIPELINING": "1",  # half the commands in the container
    }
    done = subprocess.run(
        command,
        cwd=_ANSIBLE,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Played(done.returncode, done.stdout)


def prove(
    machine: Machine, tests: str = "tests/host", *, url: str = "", options: tuple[str, ...] = ()
) -> Proved:
    """Runs tests/host against the machine, as `make host-test` does. url: over what, not docker."""
    command = [
        *(sys.executable, "-m", "pytest", tests, "-q", "-p", "no:cacheprovider"),
        *(
            f"--hosts={url or machine.url}",
            f"--host-wanted={machine.folder}/ready_host.yml",
            *options,
        ),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return Proved(done.returncode, done.stdout + done.stderr)
