"""What a ready host is, as `ready_host` of an Ansible group_vars file says it.

The same file feeds the roles, tests/host and every stage's preflight; nothing here knows a value.
Every key must be there: null says that a thing is not wanted, a key left out would say it in
silence.
"""

import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.host.errors import HostError
from pipeline.settings.strict_json import read_plain
from pipeline.settings.strict_yaml import MOST_BYTES, load_yaml

_PAGE_BYTES = 4096  # the kernel rounds a tmpfs up to it: any other size could never be the live one
_NOT_DEDICATED = ("/", "/dev/shm", "/run", "/tmp", "/var/tmp")  # noqa: S108  names to refuse

Word = Annotated[str, Field(pattern=r"^[^\s{}\"'$`\\]+$")]
PackageName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
PackageVersion = Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.+:~-]*$")]
SysctlName = Annotated[str, Field(pattern=r"^[a-z0-9_-]+(\.[A-Za-z0-9_*/-]+)+$")]
UserName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,30}$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
Packages = dict[PackageName, PackageVersion]
Environment = dict[VariableName, str]


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class WantedGpus(_Part):
    """The GPUs of the host, and the state that each of them is in."""

    count: int = Field(ge=1, le=64)
    """By lspci and by NVML."""
    name: str = Field(min_length=1)
    """The model's name begins so, in NVML and nvidia-smi."""
    memory_mib: int | None = Field(ge=1)
    """Framebuffer of each, total, MiB."""
    bar1_mib_at_least: int | None = Field(ge=1)
    """Below the framebuffer's size peer-to-peer fails: turn on resizable BAR."""
    idle_mib_at_most: int | None = Field(ge=0)
    """Used by processes while no stage runs; what the driver reserves for itself is not use."""
    mig: Literal["disabled"] | None
    """Both the current and the pending mode."""
    persistence: bool | None
    power_limit_watts: int | None = Field(ge=50, le=2000)


class WantedDriver(_Part):
    """The NVIDIA driver: open kernel modules."""

    branch: int = Field(ge=515, le=9999)
    """First number of the driver's version: this one or a newer one."""
    packages: Packages
    """Name to exact version; each is pinned and held."""


class WantedKernel(_Part):
    """How the kernel was started, and what is there to build modules for it."""

    command_line: tuple[Word, ...]
    """Words that /proc/cmdline holds."""
    acs_redirect: Literal["cleared"] | None
    """ACS redirect on root and switch ports; on, it loses peer writes or hangs NCCL."""
    headers: bool
    """Headers (and a DKMS build) for the running and the newest installed kernel."""


class WantedTmpfs(_Part):
    """The tmpfs of its own through which states pass."""

    path: Path
    bytes: int = Field(ge=1 << 20)
    """Live size; a multiple of the page, 4096."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        text = str(self.path)
        if not PurePosixPath(text).is_absolute() or ".." in self.path.parts:
            raise ValueError(f"states_tmpfs.path is {text!r}: an absolute path without '..'")
        if text in _NOT_DEDICATED:
            raise ValueError(f"states_tmpfs.path is {text}: a mount point of its own, as /mnt/hs")
        if self.bytes % _PAGE_BYTES:
            up = -(-self.bytes // _PAGE_BYTES) * _PAGE_BYTES
            raise ValueError(f"states_tmpfs.bytes is no multiple of {_PAGE_BYTES}: {up} is")
        return self


class WantedLimits(_Part):
    """Resource limits of the run user's sessions."""

    memlock: Literal["unlimited"] | Annotated[int, Field(ge=0)] | None
    """Locked memory, bytes, at least; GPUs pin memory."""
    stack_bytes: int | None = Field(ge=1 << 16)
    """At least."""
    nofile_at_least: int | None = Field(ge=256)
    """Open files."""


class WantedLogind(_Part):
    """systemd-logind's part."""

    remove_ipc: Literal[False] | None
    """RemoveIPC=yes wipes what a user has in /dev/shm when the last session ends."""


class WantedContainers(_Part):
    """Docker and the NVIDIA container toolkit."""

    packages: Packages
    """Name to exact version; each is pinned and held."""
    daemon: dict[str, Any] | None
    """The whole of /etc/docker/daemon.json."""


class WantedUser(_Part):
    """The user that stages run as."""

    name: UserName
    uid: int = Field(ge=1000, le=60000)
    groups: tuple[UserName, ...]
    """Besides its own."""
    directories: tuple[Path, ...]
    """Belong to the user."""

    @field_validator("directories")
    @classmethod
    def _absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        if wrong := [str(path) for path in value if not path.is_absolute() or len(path.parts) < 3]:
            raise ValueError(f"run_user.directories names {wrong[0]}: absolute, two levels deep")
        return value


class WantedNccl(_Part):
    """NCCL's variables of processes that a stage starts; never of the whole host."""

    extraction: Environment
    training: Environment


class Wanted(_Part):
    """A ready host. A part that is null is not wanted and not checked."""

    gpus: WantedGpus | None
    driver: WantedDriver | None
    kernel: WantedKernel | None
    states_tmpfs: WantedTmpfs | None
    sysctl: dict[SysctlName, int | str] | None
    governor: Word | None
    """CPU frequency governor of every core that has one."""
    limits: WantedLimits | None
    logind: WantedLogind | None
    containers: WantedContainers | None
    run_user: WantedUser | None
    nccl: WantedNccl | None

    @model_validator(mode="after")
    def _one_version(self) -> Self:
        driver = self.driver.packages if self.driver else {}
        containers = self.containers.packages if self.containers else {}
        if both := sorted(n for n in driver.keys() & containers if driver[n] != containers[n]):
            raise ValueError(f"two versions of {both[0]}: in driver and in containers")
        return self

    @property
    def packages(self) -> Packages:
        """All packages that are pinned and held, name to exact version."""
        driver = self.driver.packages if self.driver else {}
        containers = self.containers.packages if self.containers else {}
        return {**driver, **containers}


def read_wanted(path: Path) -> Wanted:
    """Reads `ready_host` of a group_vars file; other keys of the file are Ansible's own business.

    HostError names the file, the key, what stands there and what may.
    """
    try:
        value = load_yaml(read_plain(path, most_bytes=MOST_BYTES).decode())
    except (OSError, UnicodeError, yaml.YAMLError, ValueError) as error:
        raise HostError(
            f"{path}: {error}",
            wanted="a YAML file of Ansible variables with ready_host",
            next_step="correct the file, or name another one in run.host",
        ) from error
    found = value.get("ready_host") if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise HostError(
            f"{path} has no mapping ready_host",
            wanted="what a ready host is, as in ansible/group_vars/gpu_hosts.yml",
            next_step="correct the file, or name another one in run.host",
        )
    if (templated := _templated(found)) is not None:
        raise HostError(
            f"{path}: ready_host.{templated} is an Ansible template",
            wanted="the value itself: this file is read without Ansible too",
            next_step="write the value there, and let the template refer to it",
        )
    try:
        # Through JSON: lists become tuples and strings paths, and nothing else is converted.
        return Wanted.model_validate_json(json.dumps(found, allow_nan=False))
    except ValidationError as error:
        details = error.errors(include_url=False)[:8]
        keys = [".".join(["ready_host", *map(str, detail["loc"])]) for detail in details]
        shown = [
            key if detail["type"] == "missing" else f"{key} is {detail['input']!r:.80}"
            for key, detail in zip(keys, details, strict=True)
        ]
        raise HostError(
            f"{path}: " + "; ".join(shown),
            wanted="; ".join(
                f"{key}: {detail['msg'].removeprefix('Value error, ')}"
                for key, detail in zip(keys, details, strict=True)
            ),
            next_step="correct the key (null: not wanted, not checked)",
        ) from error
    except (TypeError, ValueError) as error:
        raise HostError(
            f"{path}: {error}",
            wanted="values that JSON can hold (a date or a set cannot)",
            next_step="quote the value in that file",
        ) from error


def _templated(value: Any) -> str | None:
    """Dotted key of the first string with a Jinja expression below `value`; None without one."""
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    for key, inner in pairs:
        if isinstance(inner, str) and ("{{" in inner or "{%" in inner):
            return str(key)
        if (below := _templated(inner)) is not None:
            return f"{key}.{below}"
    return None
