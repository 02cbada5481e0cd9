"""The order of the stages, and running one together with those it needs."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from pipeline.slate.manifest import Manifest
from pipeline.slate.stage import Stage, ensure, perform, say_bare
from pipeline.slate.wipe import MANIFEST
from pipeline.stages.adopt import AdoptStage
from pipeline.stages.evaluate import EvaluateStage
from pipeline.stages.export import ExportStage
from pipeline.stages.extract import ExtractStage
from pipeline.stages.follow import is_adopted, recorded_settings, recorded_tokens
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


ADOPT = "adopt"


def stage_of(name: str, run: Run, *, follow: bool = True) -> Stage:
    """A stage by name; the one that goes on with an output of extract that was adopted.

    follow: off for a stage that starts over. KeyError when unknown.
    """
    if name == ADOPT:
        return AdoptStage(run)
    output = run.output(name)
    if not (follow and name == "extract" and is_adopted(output)):
        return STAGES[name](run)
    recorded = recorded_settings(output)["dump"]
    sealed = (output / MANIFEST).is_file()
    return AdoptStage(run, dump=Path(recorded["path"]), sealed=recorded if sealed else None)


def following(run: Run, name: str, *, resume: bool) -> Run:
    """The run with the token ids that its samples were prepared from, and that is said.

    Not for prepare itself where it starts over, nor where the command names another source.
    """
    tokens = recorded_tokens(run.output("prepare"), run.origins)
    if tokens is None or (name == "prepare" and not resume):
        return run
    if run.settings.prepare.tokens is None:
        say_bare(f"prepare was made from token ids, {tokens}: following that")
    update = {"input": None, "prompts": None, "answers": "file", "tokens": tokens}
    prepare = run.settings.prepare.model_copy(update=update)
    return replace(run, settings=run.settings.model_copy(update={"prepare": prepare}))


def needed_by(name: str, run: Run) -> list[str]:
    """The stages whose outputs a stage needs, in the order they run. KeyError when unknown."""
    names = list(STAGES)[: list(STAGES).index("extract" if name == ADOPT else name)]
    return [other for other in names if other != "target" or run.made_target]


def check_environments(names: Iterable[str], run: Run, *, anew: str = "") -> None:
    """NcclError, before the first stage, where a later one could not take run.nccl.

    Sealed stages will not run, but for `anew`.
    """
    for name in names:
        if name == anew or not (run.output(name) / MANIFEST).is_file():
            dict(stage_of(name, run, follow=name != anew).environment)


def run_stage(name: str, run: Run, *, resume: bool) -> Manifest:
    """Runs one stage from a clean slate (or resumes it), after making sure of those before it."""
    run = following(run, name, resume=resume)
    before = needed_by(name, run)
    check_environments([*before, name], run, anew="" if resume else name)
    for other in before:
        stage = stage_of(other, run)
        if isinstance(stage, AdoptStage):
            say_bare(f"extract was adopted from {stage.dump_path}: following that")
        ensure(stage, root=run.folder, threads=run.threads, place=run.place)
    return perform(
        stage_of(name, run, follow=resume),
        root=run.folder,
        resume=resume,
        threads=run.threads,
        place=run.place,
    )
