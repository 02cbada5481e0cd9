"""The stage protocol: lock, checks, wipe, run, verify, seal.

Everything that can fail for a reason known beforehand fails before the wipe. A stage that ends in
any other way than sealed leaves either the old sealed output or nothing sealed.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from pipeline.host.disk import existing_parent, free_bytes
from pipeline.host.facts import host_facts, source_commit, versions
from pipeline.host.gpus import GpuFacts, read_gpus
from pipeline.host.preflight import refuse_unready, scope_of
from pipeline.slate.errors import Damaged, DiskFault, GpusBusy, OtherIntent
from pipeline.slate.files import disk_fault
from pipeline.slate.lock import lock
from pipeline.slate.log import SAY, open_log
from pipeline.slate.manifest import Manifest, changed_files, differences, seal_files
from pipeline.slate.place import HOST, Place
from pipeline.slate.progress import Progress, duration, in_mib
from pipeline.slate.wipe import MANIFEST, check_wipeable, claim, drop_partials, read_marker, wipe

IDLE_MIB = 16  # what an idle GPU may show as used besides the driver's own reservation
_SETTLE_SECONDS = 30.0


@dataclass(frozen=True)
class Workspace:
    """Where a stage works: its output directory, the log for its children, whether it resumes."""

    output: Path
    log: Path
    resume: bool


@dataclass(frozen=True)
class Outcome:
    """What a stage proved of its output.

    counts and facts go into the manifest and its digest; measured goes into the manifest alone (it
    may differ between equal runs); known_digests are sha256 of files that the stage has just
    verified itself; volatile names files that are kept but do not count towards the digest.
    """

    counts: Mapping[str, Any]
    facts: Mapping[str, Any]
    measured: Mapping[str, Any] = field(default_factory=dict)
    known_digests: Mapping[str, str] = field(default_factory=dict)
    volatile: Callable[[str], bool] = lambda _name: False


class Stage(Protocol):
    """One stage, bound to its settings."""

    @property
    def name(self) -> str:
        """Its name, which is also its output's folder."""

    @property
    def inputs(self) -> Mapping[str, Path]:
        """Sealed directories that it reads, by the name of the stage that made them."""

    @property
    def decides(self) -> Mapping[str, Any]:
        """The settings (and digests of unsealed input files) that decide its output."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPUs that it will use."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What its children get on top of the bare environment; recorded."""

    def check(self) -> int:
        """All that can fail beforehand. Gives the bytes of disk that the output will need."""

    def run(self, workspace: Workspace) -> None:
        """Does the work into workspace.output."""

    def verify(self, workspace: Workspace) -> Outcome:
        """Proves the output whole from what lies on disk."""


class StageStopped(BaseException):
    """SIGTERM or SIGHUP arrived; unwinds like Ctrl-C so that children are stopped in order."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def perform(
    stage: Stage, *, root: Path, resume: bool, threads: int, place: Place = HOST
) -> Manifest:
    """Runs one stage to its seal. Any Fault of the rooms, or SlateError.

    root: the run's directory; the output is root/<stage name>. resume: continue an unsealed output
    whose intent is the same; a sealed matching one is left as it is.
    """
    output = root / stage.name
    held = lock(root, purpose=stage.name, container=place.container)
    with disk_as_fault(output), held, terminate_as_exception():
        log = open_log(root, stage=stage.name)
        started, clock = time.time(), time.monotonic()  # the first may jump
        SAY.info("%s: log %s", stage.name, log)
        if not (resume and (output / MANIFEST).is_file()):
            check_host(stage.name, stage.gpus, place)  # before minutes of digests
        manifests = {name: _check_input(name, path, threads) for name, path in stage.inputs.items()}
        intent = {
            "settings": dict(stage.decides),
            "inputs": {name: manifest.digest for name, manifest in manifests.items()},
        }
        if resume and (output / MANIFEST).is_file():
            manifest = Manifest.read(output)
            _same_intent(stage.name, manifest.intent, intent)
            SAY.info("%s: already sealed, nothing to resume: %s", stage.name, manifest.digest)
            return manifest
        resume = resume and _resumable(stage.name, output, intent)
        needed = stage.check()
        environment = dict(stage.environment)  # may be refused, so before the wipe
        check_gpus(stage.gpus, before=True)
        check_wipeable(output, root=root)
        _check_room(output, needed, resume=resume)
        if resume:
            drop_partials(output)
        else:
            wipe(output, root=root)
            claim(output, stage=stage.name, intent=intent)
        workspace = Workspace(output, log, resume)
        try:
            stage.run(workspace)
        finally:
            check_gpus(stage.gpus, before=False)
        outcome = stage.verify(workspace)
        files = seal_files(
            output, known=outcome.known_digests, volatile=outcome.volatile, threads=threads
        )
        manifest = Manifest(
            stage=stage.name,
            settings=intent["settings"],
            inputs=intent["inputs"],
            counts=outcome.counts,
            facts=outcome.facts,
            files=files,
            provenance={
                "measured": dict(outcome.measured),
                "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
                "seconds": round(time.monotonic() - clock, 1),
                "resumed": resume,
                "host": host_facts(),
                "versions": versions(),
                "commit": place.commit or source_commit(Path(__file__).parent),
                "image": place.image,
                "environment": environment,
                "log": log.name,
            },
        )
        manifest.write(output)
        with suppress(OSError):  # of the log: sealed is sealed
            SAY.info(
                "%s: sealed in %s, digest %s",
                stage.name,
                duration(time.monotonic() - clock),
                manifest.digest,
            )
        return manifest


def ensure(stage: Stage, *, root: Path, threads: int, place: Place = HOST) -> None:
    """Makes sure that a stage which another one needs is sealed and matching.

    Absent: runs it and says so. Unsealed but begun: resumes it. Sealed and matching: reuses it.
    Sealed and not matching: NotSealed, which says what differs.
    """
    output = root / stage.name
    if not (output / MANIFEST).is_file():
        begun = output.is_dir() and read_marker(output) is not None
        what = "was begun and not finished: continuing it" if begun else "is absent: running it"
        say_bare(f"{stage.name} {what}")
        perform(stage, root=root, resume=begun, threads=threads, place=place)
        return
    manifest = Manifest.read(output)
    intent = {
        "settings": dict(stage.decides),
        "inputs": {name: Manifest.read(path).digest for name, path in stage.inputs.items()},
    }
    _same_intent(stage.name, manifest.intent, intent)
    say_bare(f"{stage.name} is sealed and matches: reusing {manifest.digest[:12]}")


def say_bare(message: str) -> None:
    """Tells the user, in the log too once there is one."""
    if SAY.handlers:
        SAY.info("%s", message)
    else:  # before any log is open
        os.write(1, (message + "\n").encode())


def _check_input(name: str, path: Path, threads: int) -> Manifest:
    """Reads an input's seal and compares every file with it, byte for byte."""
    manifest = Manifest.read(path)
    total = sum(file.bytes for file in manifest.files.values()) >> 20
    with Progress(f"checking {name}", total=total, unit="MiB") as progress:
        bad = changed_files(path, manifest, threads=threads, advance=in_mib(progress))
    if bad:
        listed = "; ".join(f"{path / file} {what}" for file, what in bad[:3])
        raise Damaged(
            f"{len(bad)} of {len(manifest.files)} files of {name} changed after the seal: {listed}",
            wanted="the bytes that were sealed",
            next_step=f"make verify says what is lost and what to do; make {name} makes it anew",
        )
    return manifest


def _same_intent(name: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if lines := differences(wanted, found):
        raise OtherIntent(
            f"the sealed output of {name} was made from something else:\n  "
            + "\n  ".join(lines[:12]),
            wanted="an output that matches the present settings and inputs",
            next_step=f"make {name} starts it over; or give the PROFILE, INPUT, ANSWERS and SET "
            "that it was made with (make show)",
        )


def _resumable(name: str, output: Path, intent: Mapping[str, Any]) -> bool:
    marker = read_marker(output) if output.is_dir() else None
    if marker is None:
        SAY.info("%s: nothing to resume, starting from a clean slate", name)
        return False
    begun = marker.get("intent")
    if lines := differences(intent, begun if isinstance(begun, Mapping) else {}):
        raise OtherIntent(
            f"the unfinished output of {name} was begun from something else:\n  "
            + "\n  ".join(lines[:12]),
            wanted="the settings and inputs that it was begun with",
            next_step=f"make {name} without RESUME starts it over",
        )
    return True


def _check_room(output: Path, needed: int, *, resume: bool) -> None:
    """Room on the disk, counting what the wipe (or the part already there) gives back."""
    reusable = 0
    if output.is_dir():
        reusable = sum(
            path.stat().st_blocks * 512
            for path in output.rglob("*")
            if path.is_file() and not path.is_symlink()
        )
    free = free_bytes(output) + reusable
    if free < needed:
        raise DiskFault(
            f"{existing_parent(output)}: {free >> 20} MiB free"
            + (" (with what is there already)" if resume else " (after the wipe)"),
            wanted=f"{needed >> 20} MiB",
            next_step="free space there, or set run.root to a larger disk",
        )


def check_host(name: str, gpus: tuple[int, ...], place: Place) -> None:
    """HostError, with all that is wrong, unless the host is what a stage on `gpus` wants."""
    if place.wanted is None:
        return
    scope = scope_of(
        name,
        gpus=gpus,
        container=place.container is not None,
        shm_bytes=place.shared_memory_bytes,
    )
    SAY.info("%s", refuse_unready(place.wanted, scope))


def check_gpus(wanted: tuple[int, ...], *, before: bool) -> None:
    """GPUs at 0 MiB, or SlateError that names the holder.

    After the stage they get some time to settle; a stage that wants no GPU is only told.
    """
    if not wanted:
        if before:
            SAY.info("GPUs: none wanted by this stage (%s)", _gpu_summary(read_gpus()))
        return
    deadline = time.monotonic() + (0.0 if before else _SETTLE_SECONDS)
    while True:
        facts = read_gpus()
        problems = gpu_problems(facts, wanted)
        if not problems:
            SAY.info("GPUs %s: 0 MiB used, no process", ", ".join(map(str, wanted)))
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(1.0)
    raise GpusBusy(
        "; ".join(problems),
        wanted="every GPU of the stage at 0 MiB with no process"
        + ("" if before else " again at its end"),
        next_step="stop what holds them (this project never kills what it did not start)",
    )


def _gpu_summary(facts: GpuFacts) -> str:
    return facts.problem or f"{len(facts.gpus)} on this machine, driver {facts.driver}"


def gpu_problems(facts: GpuFacts, wanted: tuple[int, ...]) -> list[str]:
    """What stands against using the wanted GPUs, one sentence each; empty when they are free."""
    if facts.problem:
        return [facts.problem]
    present = {gpu.index: gpu for gpu in facts.gpus}
    problems = []
    for index in wanted:
        gpu = present.get(index)
        if gpu is None:
            problems.append(f"GPU {index} is not there ({len(present)} are)")
            continue
        for process in gpu.processes:
            command = process.command or "(not visible here: look on the host, or in a container)"
            problems.append(
                f"GPU {index} ({gpu.name}): {process.used_mib} MiB held by PID {process.pid} "
                f"{command}"
            )
        if gpu.used_mib > IDLE_MIB and not gpu.processes:
            problems.append(
                f"GPU {index} ({gpu.name}): {gpu.used_mib} MiB used by no process that is visible"
            )
    return problems


@contextmanager
def disk_as_fault(output: Path) -> Iterator[None]:
    """Says what a disk did, and how the stage goes on: from its old seal, or from what is whole."""
    try:
        yield
    except OSError as error:
        sealed = "still sealed" if (output / MANIFEST).is_file() else "not sealed"
        again = f"make {output.name}" + ("" if sealed == "still sealed" else " RESUME=1")
        fault = disk_fault(error, place=output, next_step=f"{again} ({output} is {sealed})")
        if fault is None:
            raise
        raise fault from error


@contextmanager
def terminate_as_exception() -> Iterator[None]:
    """Lets SIGTERM, and SIGHUP unless it is ignored (nohup), unwind the stage; once, then no more.

    What comes after the first is ignored while children are stopped, which takes seconds.
    """
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise StageStopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
