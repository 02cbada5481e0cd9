"""The order of the stages, and running one together with those it needs."""

from collections.abc import Callable, Iterable

from pipeline.slate.manifest import Manifest
from pipeline.slate.stage import Stage, ensure, perform
from pipeline.slate.wipe import MANIFEST
from pipeline.stages.evaluate import EvaluateStage
from pipeline.stages.export import ExportStage
from pipeline.stages.extract import ExtractStage
from pipeline.stages.prepare import PrepareStage
from pipeline.stages.report import ReportStage
from pipeline.stages.run import Run
from pipeline.stages.target import TargetStage
from pipeline.stages.train import TrainStage

STAGES: dict[str, Callable[[Run], Stage]] = {
    "target": TargetStage,
    "prepare": PrepareStage,
    "extract": ExtractStage,
    "train": TrainStage,
    "export": ExportStage,
    "evaluate": EvaluateStage,
    "report": ReportStage,
}


def needed_by(name: str, run: Run) -> list[str]:
    """The stages whose outputs a stage needs, in the order they run. KeyError when unknown."""
    names = list(STAGES)[: list(STAGES).index(name)]
    return [other for other in names if other != "target" or run.made_target]


def check_environments(names: Iterable[str], run: Run, *, anew: str = "") -> None:
    """NcclError, before the first stage, where a later one could not take run.nccl.

    Sealed stages will not run, but for `anew`.
    """
    for name in names:
        if name == anew or not (run.output(name) / MANIFEST).is_file():
            dict(STAGES[name](run).environment)


def run_stage(name: str, run: Run, *, resume: bool) -> Manifest:
    """Runs one stage from a clean slate (or resumes it), after making sure of those before it."""
    before = needed_by(name, run)
    check_environments([*before, name], run, anew="" if resume else name)
    for other in before:
        ensure(STAGES[other](run), root=run.folder, threads=run.threads, place=run.place)
    return perform(
        STAGES[name](run), root=run.folder, resume=resume, threads=run.threads, place=run.place
    )
