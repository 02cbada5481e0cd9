"""All facts that the checks of a scope need, each read within a time limit."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from pipeline.host.cpu import read_governors
from pipeline.host.docker import DockerFacts, read_docker
from pipeline.host.driver import Module, read_module
from pipeline.host.finding import Scope
from pipeline.host.gpus import GpuFacts, read_gpus
from pipeline.host.kernel import KernelFacts, read_kernel
from pipeline.host.limits import Limits, read_limits
from pipeline.host.logind import RemoveIpc, read_remove_ipc
from pipeline.host.logs import Event, read_events
from pipeline.host.lspci import PciFacts, read_pci
from pipeline.host.nccl import read_nccl
from pipeline.host.packages import Package, read_packages
from pipeline.host.reader import Entry, Missing, Reader, Room
from pipeline.host.sysctl import read_sysctl
from pipeline.host.tmpfs import TmpfsFacts, read_tmpfs
from pipeline.host.users import User, read_folders, read_user
from pipeline.host.wanted import Wanted

NOT_READ = Missing("not read")
_NO_GPUS = GpuFacts((), None, NOT_READ.reason)
T = TypeVar("T")


@dataclass(frozen=True)
class HostFacts:
    """What a host showed. A fact that no check asked for is NOT_READ."""

    gpus: GpuFacts = _NO_GPUS
    pci: PciFacts | Missing = NOT_READ
    module: Module | Missing = NOT_READ
    events: tuple[Event, ...] | Missing = NOT_READ
    kernel: KernelFacts | Missing = NOT_READ
    packages: Mapping[str, Package] | Missing = NOT_READ
    tmpfs: TmpfsFacts | Missing = NOT_READ
    shm: Room | Missing = NOT_READ
    remove_ipc: RemoveIpc | Missing = NOT_READ
    sysctl: Mapping[str, str | Missing] = field(default_factory=dict)
    governors: Mapping[str, str] | Missing = NOT_READ
    limits: Limits | Missing = NOT_READ
    docker: DockerFacts | Missing = NOT_READ
    user: User | Missing | None = NOT_READ
    folders: Mapping[str, Entry | Missing] = field(default_factory=dict)
    nccl: Any | Missing = NOT_READ

    def as_json(self) -> dict[str, Any]:
        """As JSON, without what was not read."""
        unread = {"reason": NOT_READ.reason, "hung": False}
        return {key: value for key, value in asdict(self).items() if value != unread}


def gather(
    wanted: Wanted,
    reader: Reader,
    scope: Scope,
    *,
    gpus: Callable[[], GpuFacts] = read_gpus,
) -> HostFacts:
    """Reads what the checks of `scope` will look at, and nothing else. Never raises."""

    def if_asked(areas: tuple[str, ...], read: Callable[[], T]) -> T | Missing:
        asked = any(scope.wants(code) for code in scope.codes if code.startswith(areas))
        return read() if asked else NOT_READ

    user, tmpfs = wanted.run_user, wanted.states_tmpfs
    folders = [str(path) for path in user.directories] if user else []
    found_gpus = if_asked(("HOST-GPU", "HOST-DRIVER-BRANCH"), gpus)
    found_sysctl = if_asked(("HOST-SYSCTL",), lambda: read_sysctl(reader, wanted.sysctl or {}))
    found_folders = if_asked(("HOST-USER-DIRECTORY",), lambda: read_folders(reader, folders))
    names = tuple(wanted.packages)
    whose = user.name if user and not (scope.container or scope.own_limits) else None
    return HostFacts(
        gpus=_NO_GPUS if isinstance(found_gpus, Missing) else found_gpus,
        pci=if_asked(("HOST-GPU", "HOST-KERNEL-ACS"), lambda: read_pci(reader)),
        module=if_asked(("HOST-GPU", "HOST-DRIVER-BRANCH"), lambda: read_module(reader)),
        events=if_asked(("HOST-GPU-XID",), lambda: read_events(reader)),
        kernel=if_asked(("HOST-KERNEL",), lambda: read_kernel(reader)),
        packages=if_asked(("HOST-DRIVER-HELD", "HOST-GPU-MISMATCH"), lambda: _named(reader, names)),
        tmpfs=if_asked(("HOST-TMPFS",), lambda: read_tmpfs(reader, str(tmpfs.path)))
        if tmpfs
        else NOT_READ,
        shm=if_asked(("HOST-SHM-SIZE",), lambda: reader.room("/dev/shm")),  # noqa: S108
        remove_ipc=if_asked(("HOST-SHM-REMOVEIPC",), lambda: read_remove_ipc(reader)),
        sysctl={} if isinstance(found_sysctl, Missing) else found_sysctl,
        governors=if_asked(("HOST-CPU",), lambda: read_governors(reader)),
        limits=if_asked(("HOST-LIMITS",), lambda: read_limits(reader, whose)),
        docker=if_asked(("HOST-DOCKER",), lambda: read_docker(reader)),
        user=if_asked(("HOST-USER",), lambda: read_user(reader, user.name)) if user else NOT_READ,
        folders={} if isinstance(found_folders, Missing) else found_folders,
        nccl=if_asked(("HOST-NCCL",), lambda: read_nccl(reader)),
    )


def _named(reader: Reader, names: tuple[str, ...]) -> Mapping[str, Package] | Missing:
    return read_packages(reader, names) if names else {}
