"""evaluate: acceptance measured by real speculative decoding of held-out prompts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pipeline.evaluation.acceptance import Acceptance, summarise
from pipeline.evaluation.acceptance import Outcome as DecodedTwice
from pipeline.settings.environment import child_environment
from pipeline.slate.child import Child
from pipeline.slate.files import read_json, write_atomic, write_json
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
        """Its own settings, but the bound on the result and the number of processes."""
        values = self._settings.model_dump(
            mode="json", exclude={"least_acceptance_length", "workers"}
        )
        return {**values, "target": self._run.target_decides()}

    @property
    def environment(self) -> Mapping[str, str]:
        """Of the decoding processes, which share the threads."""
        extra = {"OMP_NUM_THREADS": str(max(1, self._run.threads // self._settings.workers))}
        return self._run.environment(gpus=self.gpus, extra=extra)

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
        """Decodes in one process or several, and keeps what they report, in the prompts' order."""
        prompts = self._prompts()
        _write_lines(workspace.output / _PROMPTS, prompts)
        workers = min(self._settings.workers, len(prompts))
        outcomes: dict[str, dict[str, Any]] = {}
        with ExitStack() as children:
            parts = []
            for number in range(workers):
                path = workspace.output / f"part-{number}.jsonl"
                _write_lines(path, prompts[number::workers])
                parts.append(children.enter_context(self._child(workspace, path)))
            progress = children.enter_context(
                Progress("evaluate", total=len(prompts), unit="prompts")
            )
            for event in _merged(parts):
                if event["event"] == "prompt":
                    outcomes[event["outcome"]["prompt"]] = event["outcome"]
                    progress.advance()
        for number in range(workers):
            (workspace.output / f"part-{number}.jsonl").unlink()
        ordered = [outcomes[prompt["id"]] for prompt in prompts if prompt["id"] in outcomes]
        _write_lines(workspace.output / _OUTCOMES, ordered)
        acceptance = summarise(
            [DecodedTwice.from_json(outcome) for outcome in ordered],
            draft_tokens=self._settings.draft_tokens,
        )
        write_json(workspace.output / ACCEPTANCE, acceptance.to_json())

    def _child(self, workspace: Workspace, prompts: Path) -> Child:
        request = {
            "target": str(self._run.target_folder),
            "drafter": str(self._run.output("export")),
            "prompts": str(prompts),
            "max_new_tokens": self._settings.max_new_tokens,
            "draft_tokens": self._settings.draft_tokens,
            "dtype": self._settings.compute_dtype,
            "threads": int(self.environment["OMP_NUM_THREADS"]),
            "end_ids": sorted(self._run.end_of_turn_ids(self._run.tokenizer())),
            "device": device_of(self.gpus),
            "remote_code": self._run.settings.target.remote_code,
        }
        return Child(
            "pipeline.evaluation.worker",
            environment=child_environment(self.environment),
            log=workspace.log,
            request=request,
        )

    def verify(self, workspace: Workspace) -> Outcome:
        """Identical outputs in float32, and at least the wanted acceptance length."""
        result = Acceptance.from_json(read_json(workspace.output / ACCEPTANCE))
        _say(result)
        decoded = _lines(workspace.output / _OUTCOMES)
        asked = _lines(workspace.output / _PROMPTS)
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


def _write_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(value) + "\n" for value in values)
    write_atomic(path, text.encode())


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _merged(children: Sequence[Child]) -> Iterator[dict[str, Any]]:
    """Events of all children as they come. The first ChildFailed of any of them ends it."""
    events: SimpleQueue[dict[str, Any] | Exception] = SimpleQueue()

    def read(child: Child) -> None:
        try:
            for event in child.events():
                events.put(event)
        except Exception as error:
            events.put(error)

    for child in children:
        Thread(target=read, args=(child,), daemon=True).start()
    going = len(children)
    while going:
        event = events.get()
        if isinstance(event, Exception):
            raise event
        going -= event["event"] == "done"
        yield event


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
