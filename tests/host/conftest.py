"""Whether a host is ready, asked from outside by testinfra; wanted is what ready_host says.

    pytest tests/host --hosts=ssh://root@gpu1 --host-wanted ansible/group_vars/gpu_hosts.yml

Not collected without --hosts: these tests say whether a host is ready, not whether code is right.
"""

import re
from collections import Counter
from pathlib import Path

import pytest
from testinfra.host import Host

from pipeline.host.gpus import GpuFacts
from pipeline.host.lspci import PciFacts, read_pci
from pipeline.host.reader import Missing
from pipeline.host.smi import read_smi
from pipeline.host.wanted import Wanted, read_wanted
from tests.host.afar import AfarReader
from tests.host.refusal import NO_GPU, NO_KERNEL, refuse

KINDS = {"hardware": NO_GPU, "kernel": NO_KERNEL}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if config.getoption("hosts") else True


def wanted_of(config: pytest.Config) -> Wanted:
    path: Path = config.getoption("host_wanted")
    return read_wanted(path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each thing of a kind that ready_host wants."""
    names = {"package", "setting", "directory", "group"} & set(metafunc.fixturenames)
    if not names:
        return
    wanted = wanted_of(metafunc.config)
    user = wanted.run_user
    things = {
        "package": list(wanted.packages),
        "setting": list(wanted.sysctl or {}),
        "directory": [str(path) for path in user.directories] if user else [],
        "group": list(user.groups) if user else [],
    }
    for name in names:
        metafunc.parametrize(name, things[name])


@pytest.fixture(scope="session")
def wanted(request: pytest.FixtureRequest) -> Wanted:
    return wanted_of(request.config)


@pytest.fixture(scope="module")
def where(host: Host) -> str:
    """The host's name in reasons and messages."""
    return str(host.backend.get_pytest_id())


@pytest.fixture(scope="module")
def reader(host: Host) -> AfarReader:
    return AfarReader(host)


@pytest.fixture(scope="module")
def cards(
    request: pytest.FixtureRequest, wanted: Wanted, reader: AfarReader, where: str
) -> PciFacts:
    """NVIDIA GPUs on the bus, whether or not a driver has them. A host without one is skipped."""
    found = read_pci(reader)
    if isinstance(found, Missing):  # no PCI bus at all, as in some virtual machines
        found = PciFacts((), (), denied=True)
    if not found.gpus:
        if wanted.gpus is not None and request.config.getoption("host_gpus") == "required":
            refuse(
                "HOST-GPU-COUNT",
                f"{where} has no NVIDIA GPU on its PCI bus",
                wanted=f"{wanted.gpus.count}",
                next_step="power the machine off and on; look at the seats, cables and firmware",
            )
        pytest.skip(f"{NO_GPU}{where}")
    return found


@pytest.fixture(scope="module")
def driver(reader: AfarReader, cards: PciFacts) -> GpuFacts:
    """What nvidia-smi says, or why it does not."""
    return read_smi(reader)


@pytest.fixture(scope="module")
def own_kernel(host: Host, where: str) -> None:
    """Skips in a container: the kernel, its command line and its modules are those around it."""
    if host.run("test -e /.dockerenv || systemd-detect-virt --quiet --container").rc == 0:
        pytest.skip(f"{NO_KERNEL}{where}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many checks of hardware and kernel were not made, for each host."""
    reasons = [
        re.sub(r"^Skipped: ", "", report.longrepr[2])
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    ]
    for kind, beginning in KINDS.items():
        counted = Counter(reason for reason in reasons if reason.startswith(beginning))
        for reason, count in sorted(counted.items()):
            terminalreporter.write_line(f"{count} {kind} checks skipped: {reason}")
