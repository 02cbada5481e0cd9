"""A host that was never there: shapes written by us from documentation, marked SIMULATED."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from pipeline.host.docker import DockerFacts, Engine
from pipeline.host.driver import Module
from pipeline.host.gather import HostFacts
from pipeline.host.gpus import Gpu, GpuFacts
from pipeline.host.kernel import Build, KernelFacts
from pipeline.host.limits import Limits
from pipeline.host.logind import RemoveIpc
from pipeline.host.lspci import PciFacts, PciGpu, Port
from pipeline.host.packages import Package
from pipeline.host.reader import Entry, HostReader, Missing, Output, Room
from pipeline.host.tmpfs import TmpfsFacts
from pipeline.host.users import User
from pipeline.host.wanted import Wanted, read_wanted

ROOT = Path(__file__).parent.parent.parent
SHIPPED = ROOT / "ansible" / "group_vars" / "gpu_hosts.yml"


@pytest.fixture(params=["SIMULATED"])
def simulated(request: pytest.FixtureRequest) -> str:
    """Puts the word into the id of a test whose facts no machine gave."""
    return str(request.param)


@dataclass(frozen=True)
class Recorded(HostReader):
    """Files below a folder, and recorded words of commands, by the beginning of their line."""

    said: Mapping[str, Output | Missing] = field(default_factory=dict)

    def command(self, *arguments: str, seconds: float = 10.0) -> Output | Missing:
        line = " ".join(arguments)
        found = [output for start, output in self.said.items() if line.startswith(start)]
        return found[0] if found else Missing(f"{arguments[0]}: No such file or directory")


@pytest.fixture
def recorded(tmp_path: Path, simulated: str) -> Callable[..., Recorded]:
    """A reader of files (path to text) and of commands (beginning to text, Output or Missing)."""

    def build(
        files: Mapping[str, str] | None = None,
        said: Mapping[str, str | Output | Missing] | None = None,
    ) -> Recorded:
        for path, text in (files or {}).items():
            place = tmp_path / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        outputs = {
            start: Output(0, words) if isinstance(words, str) else words
            for start, words in (said or {}).items()
        }
        return Recorded(tmp_path, outputs)

    return build


@pytest.fixture
def shipped() -> Path:
    return SHIPPED


@pytest.fixture
def wanted() -> Wanted:
    """What the shipped file wants, on two GPUs."""
    found = read_wanted(SHIPPED)
    assert found.gpus
    return found.model_copy(update={"gpus": found.gpus.model_copy(update={"count": 2})})


@pytest.fixture
def ready(wanted: Wanted, simulated: str) -> HostFacts:
    """Facts of a host that is all that `wanted` wants."""
    assert wanted.states_tmpfs
    assert wanted.containers
    assert wanted.nccl
    buses = ("0000:41:00.0", "0000:61:00.0")
    return HostFacts(
        gpus=GpuFacts(tuple(_gpu(n, bus) for n, bus in enumerate(buses)), "580.95.05", None),
        pci=PciFacts(
            tuple(PciGpu(bus, "Blackwell", "nvidia", 16, 16) for bus in buses),
            (Port("0000:40:01.1", "Root Port", ()),),
            denied=False,
        ),
        module=Module("580.95.05", open=True),
        events=(),
        kernel=KernelFacts(
            ("quiet", "iommu=pt", "pcie_aspm=off", "pcie_port_pm=off"),
            "6.1.0-40-amd64",
            ("6.1.0-40-amd64", "6.1.0-41-amd64"),
            ("6.1.0-40-amd64", "6.1.0-41-amd64"),
            tuple(Build("nvidia", "580.95.05", f"6.1.0-{n}-amd64", "installed") for n in (40, 41)),
        ),
        packages={
            name: Package(name, version, held=True) for name, version in wanted.packages.items()
        },
        tmpfs=TmpfsFacts(
            "/mnt/hs", "tmpfs", Room(wanted.states_tmpfs.bytes, 0), Entry(2000, 2000, 0o700, True)
        ),
        shm=Room(1 << 40, 1 << 40),
        remove_ipc=RemoveIpc(configured=False, live=False),
        sysctl={"vm.swappiness": "0", "kernel.numa_balancing": "0"},
        governors={"cpu0": "performance", "cpu1": "performance"},
        limits=Limits("cleanslate", {"memlock": None, "stack": 67108864, "nofile": 65536}),
        docker=DockerFacts(
            Engine("20.10.24", ("nvidia", "runc")), False, "1.18.1", wanted.containers.daemon
        ),
        user=User("cleanslate", 2000, ("cleanslate", "docker")),
        folders={
            path: Entry(2000, 2000, 0o750, folder=True)
            for path in ("/srv/cleanslate", "/srv/cleanslate/runs")
        },
        nccl=wanted.nccl.model_dump(),
    )


def _gpu(index: int, bus: str) -> Gpu:
    name = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    return Gpu(index, name, 0, 97887, (), bus, 131072, False, False, True, 600, 16, 16)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[str], Path]:
    """The shipped file with `ready_host` changed by `section.key=value`; null for a section."""

    def edit(*changes: str) -> Path:
        value = yaml.safe_load(SHIPPED.read_text())
        for change in changes:
            key, _, text = change.partition("=")
            *above, last = ["ready_host", *key.split("/")]
            here = value
            for name in above:
                here = here[name]
            if text == "absent":
                del here[last]
            else:
                here[last] = yaml.safe_load(text)
        path = tmp_path / "hosts.yml"
        path.write_text(yaml.safe_dump(value))
        return path

    return edit
