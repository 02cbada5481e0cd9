"""What stands between a host and being ready: facts against `ready_host`, without reading a thing.

A part of `ready_host` that is null is not wanted and not checked.
"""

from collections.abc import Iterator

from pipeline.host.check_gpus import check_acs, check_driver, check_gpus
from pipeline.host.docker import DAEMON_FILE
from pipeline.host.finding import Finding, Notes, Scope, Verdict
from pipeline.host.gather import HostFacts
from pipeline.host.nccl import FILE, difference
from pipeline.host.reader import Missing
from pipeline.host.wanted import (
    Wanted,
    WantedContainers,
    WantedKernel,
    WantedLimits,
    WantedNccl,
    WantedTmpfs,
    WantedUser,
)

_ALL = Scope()


def check_host(wanted: Wanted, facts: HostFacts) -> tuple[Finding, ...]:
    """Every fault; nothing about what could not be checked, which `examine` gives too."""
    return examine(wanted, facts).findings


def examine(wanted: Wanted, facts: HostFacts, scope: Scope = _ALL) -> Verdict:
    """Every fault of the scope, and every check that could not be made."""
    notes = Notes(scope)
    if wanted.gpus:
        check_gpus(wanted.gpus, facts, notes)
    if wanted.driver:
        check_driver(wanted.driver, facts, notes)
    if wanted.packages:
        _check_packages(wanted, facts, notes)
    if wanted.kernel:
        _check_kernel(wanted.kernel, facts, notes)
        if wanted.kernel.acs_redirect:
            check_acs(facts, notes)
    if wanted.states_tmpfs:
        _check_tmpfs(wanted.states_tmpfs, wanted.run_user, facts, notes)
    _check_shm(wanted, facts, notes)
    _check_sysctl(wanted, facts, notes)
    if wanted.governor:
        _check_governors(wanted.governor, facts, notes)
    if wanted.limits:
        _check_limits(wanted.limits, facts, notes)
    if wanted.containers:
        _check_docker(wanted.containers, facts, notes)
    if wanted.run_user:
        _check_user(wanted.run_user, facts, notes)
    if wanted.nccl:
        _check_nccl(wanted.nccl, facts, notes)
    return notes.verdict


def _tags(role: str) -> str:
    return f"ansible-playbook site.yml --tags {role}"


def _check_packages(wanted: Wanted, facts: HostFacts, notes: Notes) -> None:
    if isinstance(facts.packages, Missing):
        notes.skip("HOST-DRIVER-HELD", facts.packages.reason)
        return
    driver = wanted.driver.packages if wanted.driver else {}
    for name, version in wanted.packages.items():
        present = facts.packages.get(name)
        if present is not None and present.version == version and present.held:
            continue
        if present is None:
            found = "not installed"
        elif present.version != version:
            found = f"version {present.version}{'' if present.held else ', not held'}"
        else:
            found = f"version {version}, not held: the next upgrade takes it away"
        notes.fault(
            "HOST-DRIVER-HELD",
            f"package {name}",
            found,
            wanted=f"{version}, held",
            next_step=_tags("nvidia_driver" if name in driver else "container_runtime"),
        )


def _check_kernel(wanted: WantedKernel, facts: HostFacts, notes: Notes) -> None:
    kernel = facts.kernel
    if isinstance(kernel, Missing):
        notes.skip(
            ("HOST-KERNEL-CMDLINE", "HOST-KERNEL-HEADERS", "HOST-KERNEL-DKMS"), kernel.reason
        )
        return
    if isinstance(kernel.command_line, Missing):
        notes.skip("HOST-KERNEL-CMDLINE", kernel.command_line.reason)
    else:
        for found, word in _absent_words(wanted.command_line, kernel.command_line):
            notes.fault(
                "HOST-KERNEL-CMDLINE",
                "/proc/cmdline",
                found,
                wanted=word,
                next_step=f"{_tags('kernel_cmdline')}, then reboot",
            )
    if not wanted.headers:
        return
    if not kernel.to_serve:
        notes.skip(("HOST-KERNEL-HEADERS", "HOST-KERNEL-DKMS"), "no kernel is known here")
    for release in kernel.to_serve:
        if release not in kernel.headers:
            notes.fault(
                "HOST-KERNEL-HEADERS",
                f"kernel {release}",
                "no headers",
                wanted="headers for the running and the newest installed kernel: without them "
                "the driver is gone after a reboot",
                next_step=f"apt-get install linux-headers-{release}, or {_tags('nvidia_driver')}",
            )
    if isinstance(kernel.dkms, Missing):
        notes.skip("HOST-KERNEL-DKMS", kernel.dkms.reason)
        return
    built = {one.kernel: one.state for one in kernel.dkms if one.module.startswith("nvidia")}
    for release in kernel.to_serve:
        if built.get(release) != "installed":
            notes.fault(
                "HOST-KERNEL-DKMS",
                f"kernel {release}",
                f"the driver is {built.get(release, 'not known to DKMS')}",
                wanted="installed",
                next_step=f"dkms autoinstall -k {release}; its make.log says why it failed",
            )


def _absent_words(wanted: tuple[str, ...], line: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """What is found instead of each word. The last of two values of a key is the kernel's."""
    keys = [word.partition("=")[0] for word in wanted]
    last = {word.partition("=")[0]: word for word in line}
    for key, word in zip(keys, wanted, strict=True):
        if word not in line:
            yield (f"{last[key]}" if key in last else f"no {key}"), word
        elif keys.count(key) == 1 and last[key] != word:
            yield f"{word}, then {last[key]}, which wins", word


def _check_tmpfs(
    wanted: WantedTmpfs, user: WantedUser | None, facts: HostFacts, notes: Notes
) -> None:
    codes = ("HOST-TMPFS-MISSING", "HOST-TMPFS-SIZE", "HOST-TMPFS-OWNER")
    tmpfs, path = facts.tmpfs, str(wanted.path)
    if isinstance(tmpfs, Missing):
        notes.skip(codes, tmpfs.reason)
        return
    if isinstance(tmpfs.kind, Missing):
        notes.skip(codes, tmpfs.kind.reason)
        return
    if tmpfs.kind != "tmpfs":
        notes.fault(
            "HOST-TMPFS-MISSING",
            path,
            f"{tmpfs.kind} is mounted there" if tmpfs.kind else "nothing is mounted there",
            wanted=f"a tmpfs of {wanted.bytes} bytes",
            next_step=_tags("states_tmpfs"),
        )
        return
    if isinstance(tmpfs.room, Missing):
        notes.skip("HOST-TMPFS-SIZE", tmpfs.room.reason)
    elif tmpfs.room.bytes != wanted.bytes:
        notes.fault(
            "HOST-TMPFS-SIZE",
            path,
            f"a live size of {tmpfs.room.bytes} bytes",
            wanted=f"{wanted.bytes} bytes",
            next_step=f"mount -o remount,size={wanted.bytes} {path}, or {_tags('states_tmpfs')}",
        )
    if user is None:
        return
    if isinstance(tmpfs.entry, Missing):
        notes.skip("HOST-TMPFS-OWNER", tmpfs.entry.reason)
    elif tmpfs.entry.uid != user.uid:
        notes.fault(
            "HOST-TMPFS-OWNER",
            path,
            f"belongs to uid {tmpfs.entry.uid}",
            wanted=f"uid {user.uid}, {user.name}",
            next_step=_tags("states_tmpfs"),
        )


def _check_shm(wanted: Wanted, facts: HostFacts, notes: Notes) -> None:
    if (least := notes.scope.shm_bytes) is not None:
        if isinstance(facts.shm, Missing):
            notes.skip("HOST-SHM-SIZE", facts.shm.reason)
        elif facts.shm.free_bytes < least:
            notes.fault(
                "HOST-SHM-SIZE",
                "/dev/shm",  # noqa: S108
                f"{facts.shm.free_bytes >> 20} MiB free of {facts.shm.bytes >> 20}",
                wanted=f"{least >> 20} MiB, run.shared_memory_bytes",
                next_step="remove what dead processes left there; mount -o remount,size=BYTES "
                "/dev/shm; of a container: --shm-size",
            )
    if wanted.logind is None or wanted.logind.remove_ipc is None:
        return
    if isinstance(facts.remove_ipc, Missing):
        notes.skip("HOST-SHM-REMOVEIPC", facts.remove_ipc.reason)
        return
    # Files that say no settle it only together with a logind that has read them.
    if facts.remove_ipc.configured or facts.remove_ipc.live is True:
        where = "in its files" if facts.remove_ipc.configured else "in the running logind"
        notes.fault(
            "HOST-SHM-REMOVEIPC",
            "logind",
            f"RemoveIPC is yes {where}",
            wanted="no: else /dev/shm of a user is wiped with the last session's end",
            next_step=_tags("states_tmpfs"),
        )
    elif isinstance(facts.remove_ipc.live, Missing):
        notes.skip("HOST-SHM-REMOVEIPC", facts.remove_ipc.live.reason)


def _check_sysctl(wanted: Wanted, facts: HostFacts, notes: Notes) -> None:
    for name, value in (wanted.sysctl or {}).items():
        found = facts.sysctl.get(name, Missing(f"{name}: not read"))
        if isinstance(found, Missing):
            notes.skip("HOST-SYSCTL", found.reason)
        elif found != " ".join(str(value).split()):
            notes.fault("HOST-SYSCTL", name, found, wanted=str(value), next_step=_tags("tuning"))


def _check_governors(wanted: str, facts: HostFacts, notes: Notes) -> None:
    if isinstance(facts.governors, Missing):
        notes.skip("HOST-CPU-GOVERNOR", facts.governors.reason)
        return
    others = [one for one in facts.governors.values() if one != wanted]
    if others:
        kinds = ", ".join(sorted(set(others)))
        notes.fault(
            "HOST-CPU-GOVERNOR",
            "the cores",
            f"{len(others)} of {len(facts.governors)} on {kinds}",
            wanted=wanted,
            next_step=_tags("tuning"),
        )


def _check_limits(wanted: WantedLimits, facts: HostFacts, notes: Notes) -> None:
    if isinstance(facts.limits, Missing):
        notes.skip("HOST-LIMITS", facts.limits.reason)
        return
    memlock = None if wanted.memlock == "unlimited" else wanted.memlock
    least = {"memlock": memlock, "stack": wanted.stack_bytes, "nofile": wanted.nofile_at_least}
    for name, value in least.items():
        if value is None and not (name == "memlock" and wanted.memlock == "unlimited"):
            continue
        found = facts.limits.soft.get(name)
        if found is not None and (value is None or found < value):
            notes.fault(
                "HOST-LIMITS",
                f"{name} of {facts.limits.of}",
                str(found),
                wanted="unlimited" if value is None else f"at least {value}",
                next_step=f"{_tags('tuning')}, then log in anew; of a container: --ulimit",
            )


def _check_docker(wanted: WantedContainers, facts: HostFacts, notes: Notes) -> None:
    docker = facts.docker
    if isinstance(docker, Missing):
        notes.skip(
            ("HOST-DOCKER-ENGINE", "HOST-DOCKER-TOOLKIT", "HOST-DOCKER-DAEMON"), docker.reason
        )
        return
    runtimes = tuple((wanted.daemon or {}).get("runtimes", {}))
    if isinstance(docker.engine, Missing):
        if docker.denied:
            notes.skip(("HOST-DOCKER-ENGINE", "HOST-DOCKER-TOOLKIT"), docker.engine.reason)
        else:
            notes.fault(
                "HOST-DOCKER-ENGINE",
                "docker",
                docker.engine.reason,
                wanted="an engine that answers in time",
                next_step=f"systemctl status docker, or {_tags('container_runtime')}",
            )
            notes.skip("HOST-DOCKER-TOOLKIT", docker.engine.reason)
    elif absent := [name for name in runtimes if name not in docker.engine.runtimes]:
        notes.fault(
            "HOST-DOCKER-TOOLKIT",
            "docker",
            f"the running engine has no runtime {', '.join(absent)}",
            wanted=f"runtimes {', '.join(runtimes)}",
            next_step=f"{_tags('container_runtime')}: it restarts the engine where no container "
            "runs",
        )
    if "nvidia-container-toolkit" in wanted.packages and isinstance(docker.toolkit, Missing):
        notes.fault(
            "HOST-DOCKER-TOOLKIT",
            "nvidia-ctk",
            docker.toolkit.reason,
            wanted=f"version {wanted.packages['nvidia-container-toolkit']}",
            next_step=_tags("container_runtime"),
        )
    if wanted.daemon is not None:
        _check_daemon(wanted.daemon, docker.daemon, notes)


def _check_daemon(wanted: dict[str, object], found: object, notes: Notes) -> None:
    if isinstance(found, Missing):
        said = found.reason
    elif not isinstance(found, dict):
        said = f"holds {type(found).__name__}"
    else:
        keys = sorted({*wanted, *found})
        differing = [key for key in keys if wanted.get(key) != found.get(key)]
        said = f"other values of {', '.join(differing)}" if differing else ""
    if said:
        notes.fault(
            "HOST-DOCKER-DAEMON",
            DAEMON_FILE,
            said,
            wanted="ready_host.containers.daemon, nothing more and nothing less",
            next_step=_tags("container_runtime"),
        )


def _check_user(wanted: WantedUser, facts: HostFacts, notes: Notes) -> None:
    user = facts.user
    if isinstance(user, Missing):
        notes.skip("HOST-USER", user.reason)
    elif user is None:
        notes.fault(
            "HOST-USER", wanted.name, "no such user", wanted=f"uid {wanted.uid}",
            next_step=_tags("run_user"),
        )  # fmt: skip
    else:
        lacking = [group for group in wanted.groups if group not in user.groups]
        if user.uid != wanted.uid or lacking:
            out = f", not in {', '.join(lacking)}" if lacking else ""
            notes.fault(
                "HOST-USER", wanted.name, f"uid {user.uid}{out}",
                wanted=f"uid {wanted.uid}, in {', '.join(wanted.groups) or 'no further group'}",
                next_step=f"{_tags('run_user')}, then log in anew",
            )  # fmt: skip
    for path in map(str, wanted.directories):
        entry = facts.folders.get(path, Missing(f"{path}: not read"))
        if isinstance(entry, Missing):
            found = entry.reason
        elif not entry.folder:
            found = "no folder"
        elif entry.uid != wanted.uid:
            found = f"belongs to uid {entry.uid}"
        else:
            continue
        notes.fault(
            "HOST-USER-DIRECTORY", path, found,
            wanted=f"a folder of uid {wanted.uid}, {wanted.name}", next_step=_tags("run_user"),
        )  # fmt: skip


def _check_nccl(wanted: WantedNccl, facts: HostFacts, notes: Notes) -> None:
    if said := difference(wanted.model_dump(), facts.nccl):
        notes.fault(
            "HOST-NCCL-PROFILE",
            FILE,
            said,
            wanted="ready_host.nccl, nothing more and nothing less",
            next_step="put what make tune-nccl printed into ready_host.nccl, if it is that; then "
            + _tags("nccl"),
        )
