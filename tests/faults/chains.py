"""One stage, one trouble after the other: each start goes on from what the one before it left."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.slate.manifest import Manifest
from tests.stages.conftest import ROOT, Project, good

from .running import Injected, goes_well, start, state_of, traced, until

KILLS = 10
CONVERSATIONS = ROOT / "pipeline" / "profiles" / "tiny.jsonl"
STAGES = ("prepare", "extract", "train", "export", "evaluate", "report")


@dataclass(frozen=True)
class Killed:
    """State after each kill and after the last resume; how many were met while they ran."""

    states: list[str]
    last: str
    met: int


def kills(project: Project, stage: str) -> Killed:
    """Kills a stage ten times at seeded shares of its duration, then lets it end.

    A start resumes what the one before it left unsealed, and begins anew where that left a seal.
    The first is killed soon after the old output is wiped: on a loaded machine all others may be
    too early for that.
    """
    marker = project.folder / stage / ".cleanslate.json"
    before = marker.stat().st_mtime_ns

    def wiped() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return marker.stat().st_mtime_ns != before
        return False

    seconds = Manifest.read(project.folder / stage).provenance["seconds"]
    moments = random.Random(stage)  # noqa: S311
    states, met = [], 0
    for number in range(KILLS):
        logs = set((project.folder / "logs").iterdir())
        again = ["--resume"] if state_of(project, stage) == "unsealed" else []
        command = start(project, stage, *again)
        until(lambda: set((project.folder / "logs").iterdir()) - logs)  # noqa: B023
        if not number:
            until(lambda: wiped() or not command.process.is_alive())  # noqa: B023
        command.process.join(moments.uniform(0, seconds if number else seconds / 10))
        command.process.kill()
        met += command.wait() == -9
        states.append(state_of(project, stage))
    goes_well(project, stage, "--resume")
    return Killed(states, state_of(project, stage), met)


FAULTS = {
    "target": [Injected("fsync", "EIO", "target/.model.safetensors.partial")],
    "prepare": [
        Injected("read", "EIO", str(CONVERSATIONS), when=4, before=True),  # its first bytes
        Injected("unlink", "EROFS", "prepare/manifest.json", before=True),
        Injected("rename", "ENOSPC", "prepare/..cleanslate.json.partial"),
        Injected("fsync", "EIO", "prepare/answers.jsonl"),
        Injected("pwrite64", "ENOSPC", "prepare/.samples-00000.partial"),
        Injected("fsync", "EIO", "prepare/.counts.json.partial"),
        Injected("write", "ENOSPC", "prepare/.manifest.json.partial"),
    ],
    "extract": [
        Injected("read", "EIO", "target/model.safetensors", when=3, before=True),  # its head
        Injected("preadv2", "EIO", "prepare/samples-00000.safetensors", before=True),
        Injected("fallocate", "ENOSPC", "extract/.states-00000.partial"),
        Injected("pwrite64", "EIO", "extract/.states-00000.partial", when=3),
        Injected("fsync", "EIO", "extract/.states-00000.partial"),
        Injected("rename", "ENOSPC", "extract/.states-00000.partial"),
        Injected("fsync", "EIO", "extract/.states-00000.json.partial"),
        Injected("preadv2", "EIO", "extract/states-00000.safetensors"),  # proving what was written
        Injected("fsync", "EIO", "extract/.manifest.json.partial"),
        Injected("fsync", "EIO", "extract", when=3),  # after the manifest's rename
    ],
    "train": [
        Injected("read", "EIO", "target/model.safetensors", when=3, before=True),  # its fingerprint
        Injected("openat", "EIO", "prepare/draft_vocabulary.safetensors", when=3, before=True),
        Injected("preadv2", "EIO", "extract/states-00000.safetensors", before=True),
        Injected("preadv2", "EIO", "extract/states-00000.safetensors", when=3),  # in training
        Injected("write", "ENOSPC", "train/metrics.jsonl", when=3),
        Injected("rename", "EIO", "train/checkpoints/.step-00000004.partial"),
        Injected("fsync", "ENOSPC", "train/checkpoints/.step-00000004.partial/model.safetensors"),
        Injected("fsync", "EIO", "train/checkpoints/.step-00000008.partial/.state.json.partial"),
    ],
    "export": [
        Injected("read", "EIO", "train/checkpoints/step-00000008/model.safetensors", before=True),
        Injected("write", "ENOSPC", "export/.model.safetensors.partial"),
        Injected("rename", "EIO", "export/.config.json.partial"),
    ],
    "evaluate": [
        Injected("fsync", "EIO", "evaluate/.outcomes.jsonl.partial"),
        Injected("write", "ENOSPC", "evaluate/.acceptance.json.partial"),
    ],
    "report": [Injected("write", "ENOSPC", "report/.report.html.partial")],
}


@dataclass(frozen=True)
class Failed:
    """What a start with an injected error said, how it ended and what it left."""

    injected: Injected
    status: int
    said: str
    state: str
    places: frozenset[Path]


@dataclass(frozen=True)
class Chain:
    """Each start in its order, and the state after the last resume."""

    starts: list[Failed]
    last: str


def faults(project: Project, stage: str) -> Chain:
    """Lets one call after the other fail, resuming in between, then lets the stage end."""
    starts = []
    for injected in FAULTS[stage]:
        again = ["--resume"] if state_of(project, stage) == "unsealed" else []
        done = traced(project, injected, stage, *again)
        output = project.folder / stage
        places = frozenset(path for path in output.rglob("*"))
        state = state_of(project, stage)
        starts.append(Failed(injected, done.returncode, done.stderr, state, places))
    good(project.run(stage, "--resume"))
    return Chain(starts, state_of(project, stage))


# The longest first, so that no core is left with one of them at the end.
CHAINS: dict[tuple[str, str], Callable[[Project, str], Killed | Chain]] = {
    **{("faults", stage): faults for stage in sorted(FAULTS, key=lambda name: -len(FAULTS[name]))},
    **{("kills", stage): kills for stage in STAGES},
}
