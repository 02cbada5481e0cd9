"""Repairs that are killed (-9) before each of their renames, and what the next one makes of it.

    python -m tests.stages.killed_repairs ROOT SCRATCH

ROOT holds a damaged run. The first repair is killed when it is about to put the first shard in
place; from there on every further rename below `extract` is a moment to be killed at. Prints one
JSON line a moment: what verify said then, and how the next repair ended. One process that forks:
importing torch once is enough.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.slate.manifest import Manifest
from pipeline.stages.extract import ExtractStage
from pipeline.stages.repair import repair_run
from tests.stages.sealing import run_of, verdicts

real = os.replace


def in_child(work: Callable[[], object]) -> int | None:
    """Runs something in a forked process; its exit status, None when it was killed."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(ended) else os.WEXITSTATUS(ended)


def killed(root: Path, when: Callable[[int, str], bool]) -> Callable[[], object]:
    """A repair that is killed before the first rename for which `when(number, name)` holds."""

    def work() -> None:
        seen = 0

        def replace(source: object, target: object, **more: int) -> None:
            nonlocal seen
            if str(target).startswith(str(root / "tiny" / "extract")):
                if when(seen, Path(str(target)).name):
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1
            real(source, target, **more)

        os.replace = replace
        repair_run(run_of(root))

    return work


def finished(root: Path, *, engine: bool) -> Callable[[], object]:
    """Says what verify finds, repairs, and says what it finds then."""

    def work() -> None:
        if not engine:
            ExtractStage.capture = None  # what was captured is not captured again
        before = verdicts(root, "target", "prepare", "extract")["extract"]
        repair_run(run_of(root))
        after = verdicts(root, "target", "prepare", "extract")["extract"]
        told = {
            "before": before.state,
            "after": after.state,
            "digest": Manifest.read(root / "tiny" / "extract").digest,
            "left": sorted(path.name for path in (root / "tiny" / "extract").glob(".repair*")),
        }
        sys.stderr.write(json.dumps(told) + "\n")

    return work


def main() -> None:
    """All moments, one after the other."""
    root, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    # In ROOT itself, as the staging folder and the manifests are bound to that place.
    in_child(killed(root, lambda _number, name: name == "states-00000.safetensors"))
    base = scratch / "base"
    shutil.copytree(root, base)
    number = 0
    while True:
        status = in_child(killed(root, lambda seen, _name, last=number: seen == last))
        if status is not None:
            break
        assert in_child(finished(root, engine=False)) == 0
        number += 1
        root.rename(scratch / f"done-{number}")
        shutil.copytree(base, root)
    sys.stderr.write(json.dumps({"moments": number, "status": status}) + "\n")


if __name__ == "__main__":
    main()
