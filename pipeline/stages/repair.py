"""repair: captures again exactly the samples of `extract` that are lost, and seals it anew.

Whatever can be proven is written back from what is left (indexes, facts, markers); what cannot is
captured by one start of the engine (repair_extract).
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline.slate.files import (
    json_bytes,
    read_json,
    write_atomic,
)
from pipeline.slate.lock import lock
from pipeline.slate.log import SAY, open_log
from pipeline.slate.manifest import Manifest
from pipeline.slate.stage import terminate_as_exception
from pipeline.slate.wipe import MANIFEST
from pipeline.stages.errors import StageError
from pipeline.stages.plan import STAGES
from pipeline.stages.repair_extract import Repair, move_away
from pipeline.stages.run import Run
from pipeline.stages.verify import (
    MENDABLE,
    Verdict,
    look,
    marker_bytes,
)

_EXTRACT = "extract"


def repair_run(run: Run) -> bool:
    """Repairs what can be repaired; says the rest. True when nothing else is left to do.

    Any Fault of the stages that it does the work of; before anything is changed where it can be
    known by then.
    """
    if not run.folder.is_dir():
        SAY.info("repair: nothing is sealed in %s", run.folder)
        return True
    with (
        lock(run.folder, purpose="repair", container=run.place.container),
        terminate_as_exception(),
    ):
        log = open_log(run.folder, stage="repair")
        SAY.info("repair: log %s", log)
        _drop_halves(run.output(_EXTRACT))
        verdicts = look(run.folder, stages=list(STAGES), threads=run.threads)
        damaged = {one.stage: one for one in verdicts if one.problems}
        for stage, verdict in damaged.items():
            _mend(run.output(stage), verdict)
        changed, extract = False, damaged.get(_EXTRACT)
        if extract and any(problem.kind not in MENDABLE for problem in extract.problems):
            _check_repairable(run, damaged)
            changed = Repair(run, log).go(extract)
        left = {
            stage: one
            for stage, one in damaged.items()
            if stage != _EXTRACT and any(problem.kind not in MENDABLE for problem in one.problems)
        }
        for stage, one in left.items():
            SAY.warning("repair: %s stays damaged; next: %s", stage, one.next_step)
        if changed:
            SAY.warning(
                "repair: extract has another digest now. What was made from the old one is no "
                "longer proven by it; next: make train, and what follows"
            )
        elif not damaged:
            SAY.info("repair: nothing to repair, all that is sealed is whole")
        return not left


def _drop_halves(output: Path) -> None:
    """Removes single files that a killed writer left half written."""
    if (output / MANIFEST).is_file() and not output.is_symlink():
        for path in output.glob(".*.partial"):
            if not path.is_dir() or path.is_symlink():
                path.unlink()


def _mend(output: Path, verdict: Verdict) -> None:
    """Writes marker and manifest again where the seal tells every byte of them."""
    for problem in verdict.problems:
        path = output / problem.file
        if problem.kind == "spelling":
            write_atomic(path, json_bytes(read_json(path)))
        elif problem.kind == "marker":
            if path.is_dir() and not path.is_symlink():
                raise move_away(path)
            write_atomic(path, marker_bytes(Manifest.read(output)))
        else:
            continue
        SAY.info("repair: %s %s: written again from the seal", path, problem.what)


def _check_repairable(run: Run, damaged: Mapping[str, Verdict]) -> None:
    """StageError where extract is damaged in a way that no capture of single samples mends."""
    for name in ("target", "prepare"):
        if name in damaged and any(one.kind not in MENDABLE for one in damaged[name].problems):
            raise StageError(
                f"{name} is damaged too: {damaged[name].problems[0].file} "
                f"{damaged[name].problems[0].what}",
                wanted="the inputs of extract as they were sealed",
                next_step=f"make {name}; where that gives the same digest, then: make repair",
            )
    output = run.output(_EXTRACT)
    for problem in damaged[_EXTRACT].problems:
        if problem.kind == "extra":
            raise move_away(output / problem.file)
        if problem.kind in ("seal", "counts", "chain"):
            raise StageError(
                f"{output}: {problem.file} {problem.what}",
                wanted="a seal that tells what was captured from which inputs",
                next_step=damaged[_EXTRACT].next_step,
            )
