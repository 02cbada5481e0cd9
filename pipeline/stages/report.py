"""report: one HTML page and PNGs about a run, from its sealed outputs alone."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.evaluation.acceptance import Acceptance
from pipeline.report.facts import (
    Boundary,
    ReportFacts,
    SampleText,
    Split,
    StageRun,
    sample_text,
)
from pipeline.report.metrics import read_training
from pipeline.report.page import PAGE_NAME, write_report
from pipeline.settings.load import flatten, origin_of
from pipeline.slate.log import SAY
from pipeline.slate.manifest import Manifest
from pipeline.slate.stage import Outcome, Workspace
from pipeline.stages.errors import NotProven
from pipeline.stages.run import Run
from pipeline.store.reader import PreparedSamples

_SHOWN_SAMPLES = 6
_PICTURES = {"records.png", "loss.png", "accuracy.png", "acceptance.png"}


class ReportStage:
    """Gathers the facts of all stages and writes the page."""

    name = "report"
    gpus: tuple[int, ...] = ()

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def inputs(self) -> Mapping[str, Path]:
        """Every stage before it."""
        names = ("prepare", "extract", "train", "export", "evaluate")
        return {**self._run.target_inputs(), **{name: self._run.output(name) for name in names}}

    @property
    def decides(self) -> Mapping[str, Any]:
        """Nothing of its own."""
        return {}

    @property
    def environment(self) -> Mapping[str, str]:
        """It has no children."""
        return {}

    def check(self) -> int:
        """Needs little room."""
        return 64 << 20

    def run(self, workspace: Workspace) -> None:
        """Writes the page and the pictures."""
        write_report(workspace.output, self._facts())

    def verify(self, workspace: Workspace) -> Outcome:
        """The page and every picture are there."""
        found = {path.name for path in workspace.output.iterdir() if path.stat().st_size}
        missing = ({PAGE_NAME} | _PICTURES) - found
        if missing:
            raise NotProven(
                f"the report lacks {sorted(missing)}",
                wanted="the page and every picture",
                next_step="this is a fault of the stage: please report it",
            )
        SAY.info("report: %s", workspace.output / PAGE_NAME)
        return Outcome(counts={"files": len(found & ({PAGE_NAME} | _PICTURES))}, facts={})

    def _facts(self) -> ReportFacts:
        settings = self._run.settings
        manifests = {name: Manifest.read(path) for name, path in self.inputs.items()}
        prepared, extracted = manifests["prepare"], manifests["extract"]
        evaluated = manifests["evaluate"].provenance
        return ReportFacts(
            run=settings.run.name,
            profile=settings.description or settings.run.name,
            target=str(self._run.target_folder),
            version=str(evaluated["versions"].get("cleanslate")),
            made_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            boundaries=(
                _boundary("prepare", "records", prepared),
                _boundary("extract", "samples", extracted),
            ),
            splits=tuple(
                Split(name, split["samples"], split["tokens"], split["supervised_tokens"])
                for name, split in prepared.counts["splits"].items()
            ),
            training=read_training(self._run.output("train") / "metrics.jsonl"),
            acceptance=Acceptance.from_json(evaluated["measured"]),
            samples=self._samples(),
            stages=tuple(
                StageRun(
                    name,
                    manifest.provenance["seconds"],
                    manifest.digest,
                    manifest.provenance["started"],
                )
                for name, manifest in manifests.items()
            ),
            settings=tuple(
                (key, str(value), origin_of(key, self._run.origins))
                for key, value, _ in flatten(settings)
            ),
            host=tuple((key, str(value)) for key, value in evaluated["host"].items()),
            versions=tuple((key, str(value)) for key, value in evaluated["versions"].items()),
            notices=_notices(prepared, extracted),
        )

    def _samples(self) -> tuple[SampleText, ...]:
        samples, tokenizer = (
            PreparedSamples.open(self._run.output("prepare")),
            self._run.tokenizer(),
        )
        step = max(1, len(samples.entries) // _SHOWN_SAMPLES)
        shown = samples.entries[::step][:_SHOWN_SAMPLES]
        return tuple(
            sample_text(
                entry.id,
                entry.split,
                input_ids=samples.read(entry).input_ids.tolist(),
                supervised=samples.read(entry).supervised.tolist(),
                decode=lambda ids: str(tokenizer.decode(ids)),
            )
            for entry in shown
        )


def _boundary(stage: str, unit: str, manifest: Manifest) -> Boundary:
    counts = manifest.counts
    return Boundary(stage, unit, counts["read"], counts["kept"], dict(counts["skipped"]))


def _notices(prepared: Manifest, extracted: Manifest) -> tuple[str, ...]:
    measured = extracted.provenance["measured"]
    notices = [
        "The states were adopted from another system's dump: the stored final states predict the "
        f"supervised tokens of {measured['supervised_log_probability_samples']} samples with "
        f"{measured['supervised_log_probability_nats']:.3f} nats a token."
        if "supervised_log_probability_nats" in measured
        else f"Log-probabilities of {measured['logprob_samples']} samples, recomputed from the "
        f"stored final states, differ from the engine's own by at most "
        f"{measured['logprob_greatest_difference_nats']:.4f} nats "
        f"(allowed: {measured['logprob_tolerance_nats']})."
    ]
    if prepared.counts["cut_answers"]:
        notices.append(
            f"{prepared.counts['cut_answers']} answers reached the length limit; they are kept "
            "without a supervised end of turn."
        )
    if prepared.counts["cut_to_length"]:
        notices.append(
            f"{prepared.counts['cut_to_length']} conversations were cut to prepare.max_length."
        )
    return tuple(notices)
