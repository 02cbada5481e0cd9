"""evaluate: acceptance measured by real speculative decoding of held-out prompts."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline.evaluation.acceptance import Acceptance
from pipeline.settings.environment import child_environment
from pipeline.slate.child import Child
from pipeline.slate.files import read_json, write_json
from pipeline.slate.log import SAY
from pipeline.slate.progress import Progress
from pipeline.slate.stage import Outcome, Workspace
from pipeline.stages.errors import StageError
from pipeline.stages.run import Run, device_of
from pipeline.store.reader import PreparedSamples

ACCEPTANCE = "acceptance.json"
_PROMPTS = "prompts.jsonl"
_OUTCOMES = "outcomes.jsonl"


class EvaluateStage:
    """Decodes each held-out prompt plainly and with the drafter, and compares."""

    name = "evaluate"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._settings = run.settings.evaluate

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPUs of the decoding process."""
        return self._settings.gpus

    @property
    def inputs(self) -> Mapping[str, Path]:
        """Held-out samples, the exported drafter, and the target when it is made here."""
        return {
            **self._run.target_inputs(),
            "prepare": self._run.output("prepare"),
            "export": self._run.output("export"),
        }

    @property
    def decides(self) -> Mapping[str, Any]:
        """Its own settings; the bound on the result does not change it."""
        values = self._settings.model_dump(mode="json", exclude={"least_acceptance_length"})
        return {**values, "target": self._run.target_decides()}

    @property
    def environment(self) -> Mapping[str, str]:
        """Of the decoding process."""
        return self._run.environment(gpus=self.gpus)

    def check(self) -> int:
        """The engine exists and there is something to decode."""
        if self._settings.engine == "sglang":
            raise StageError(
                "evaluate.engine is sglang",
                wanted="loop: this version has no SGLang engine yet",
                next_step="set evaluate.engine=loop",
            )
        self._prompts()
        return 64 << 20

    def _prompts(self) -> list[dict[str, Any]]:
        """Held-out samples up to their first supervised token, which the answer begins with."""
        samples = PreparedSamples.open(self._run.output("prepare"))
        held_out = [entry for entry in samples.entries if entry.split == "held_out"]
        prompts, seen = [], set()
        for entry in held_out:
            sample = samples.read(entry)
            first = int(sample.supervised.nonzero()[0])
            ids = tuple(sample.input_ids[:first].tolist())
            if ids and ids not in seen:
                seen.add(ids)
                prompts.append({"id": entry.id, "prompt_ids": list(ids)})
        if not prompts:
            raise StageError(
                f"{len(held_out)} held-out samples, none with a prompt",
                wanted="at least one held-out conversation",
                next_step="raise prepare.held_out_share, then make prepare",
            )
        return prompts[: self._settings.prompts or None]

    def run(self, workspace: Workspace) -> None:
        """Starts the decoding process and keeps what it reports."""
        prompts = workspace.output / _PROMPTS
        lines = [json.dumps(prompt) for prompt in self._prompts()]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        request = {
            "target": str(self._run.target_folder),
            "drafter": str(self._run.output("export")),
            "prompts": str(prompts),
            "max_new_tokens": self._settings.max_new_tokens,
            "draft_tokens": self._settings.draft_tokens,
            "dtype": self._settings.compute_dtype,
            "threads": self._run.threads,
            "end_ids": sorted(self._run.end_of_turn_ids(self._run.tokenizer())),
            "device": device_of(self.gpus),
            "remote_code": self._run.settings.target.remote_code,
        }
        with (
            Child(
                "pipeline.evaluation.worker",
                environment=child_environment(self.environment),
                log=workspace.log,
                request=request,
            ) as child,
            (workspace.output / _OUTCOMES).open("w", encoding="utf-8") as outcomes,
            ExitStack() as shown,
        ):
            progress = Progress("evaluate", total=len(lines), unit="prompts")
            for event in child.events():
                if event["event"] == "loaded":
                    shown.enter_context(progress)
                elif event["event"] == "prompt":
                    outcomes.write(json.dumps(event["outcome"]) + "\n")
                    progress.advance()
                elif event["event"] == "acceptance":
                    write_json(workspace.output / ACCEPTANCE, event["acceptance"])

    def verify(self, workspace: Workspace) -> Outcome:
        """Identical outputs in float32, and at least the wanted acceptance length."""
        result = Acceptance.from_json(read_json(workspace.output / ACCEPTANCE))
        _say(result)
        decoded = (workspace.output / _OUTCOMES).read_text(encoding="utf-8").count("\n")
        asked = (workspace.output / _PROMPTS).read_text(encoding="utf-8").count("\n")
        if not result.prompts == decoded == asked:
            raise StageError(
                f"{asked} prompts, {decoded} outcomes, {result.prompts} counted",
                wanted="one outcome for every prompt",
                next_step="make evaluate starts over; if it stays so, report it",
            )
        difference = result.first_difference
        if difference is not None and self._settings.compute_dtype == "float32":
            raise StageError(
                f"{result.prompts - result.identical} of {result.prompts} drafted outputs differ "
                f"from plain decoding; first: {difference}",
                wanted="the same tokens on every prompt in float32",
                next_step="gaps near 0 are ties that rounding decides; anything else is a fault "
                "of the loop: please report it with outcomes.jsonl",
            )
        least = self._settings.least_acceptance_length
        if result.acceptance_length < least:
            raise StageError(
                f"measured acceptance length {result.acceptance_length:.3f}",
                wanted=f"at least evaluate.least_acceptance_length, {least}",
                next_step="train longer or on more data; make report shows the curves",
            )
        return Outcome(
            counts={"prompts": result.prompts, "identical": result.identical},
            facts={"acceptance_length": result.acceptance_length, "tokens": result.tokens},
            measured=result.to_json(),
            # Both hold seconds.
            volatile=lambda name: name in (ACCEPTANCE, _OUTCOMES),
        )


def _say(result: Acceptance) -> None:
    positions = ", ".join(
        "-" if rate.conditional is None else f"{rate.conditional:.3f}" for rate in result.positions
    )
    SAY.info(
        "evaluate: measured acceptance length %.3f tokens a target pass (%d tokens, %d passes)",
        result.acceptance_length,
        result.tokens,
        result.passes,
    )
    SAY.info("evaluate: accepted by position, given those before: %s", positions)
    SAY.info("evaluate: identical outputs on %d of %d prompts", result.identical, result.prompts)
    SAY.info(
        "evaluate: decoding took %.1f s plainly, %.1f s drafted (%.2fx)",
        result.plain_seconds,
        result.drafted_seconds,
        result.speed_up,
    )
