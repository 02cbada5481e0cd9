"""evaluate: acceptance measured by real speculative decoding of held-out prompts.

By this project's own loop, or by the SGLang server that will serve the drafter; then, where the
loop can hold the target, by both, which must agree.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pipeline.evaluation.acceptance import Acceptance, summarise
from pipeline.evaluation.acceptance import Outcome as DecodedTwice
from pipeline.evaluation.sglang_counts import AGREEMENT, Agreement, ServerOutcome, summarise_server
from pipeline.settings.environment import child_environment
from pipeline.slate.child import Child
from pipeline.slate.files import named, read_json, write_atomic, write_json
from pipeline.slate.log import SAY
from pipeline.slate.progress import Progress
from pipeline.slate.stage import Outcome, Workspace
from pipeline.stages.errors import NotProven, TooFew, TooLow
from pipeline.stages.evaluate_server import agreement, decode_on_server, server_plans
from pipeline.stages.extract_server import known_interpreter
from pipeline.stages.run import Run, device_of
from pipeline.stages.server import plan_environment, plan_flags, server_decides
from pipeline.store.reader import PreparedSamples

ACCEPTANCE = "acceptance.json"
_PROMPTS = "prompts.jsonl"
_OUTCOMES = "outcomes.jsonl"
_LOOP_OUTCOMES = "loop-outcomes.jsonl"
_SERVERS = "servers.json"
_AGREEMENT = "agreement.json"


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
    def _served(self) -> bool:
        return self._settings.engine == "sglang"

    @property
    def decides(self) -> Mapping[str, Any]:
        """Its own settings, but the bound on the result, and where it runs."""
        hidden = {"least_acceptance_length", "workers", "gpus"}
        values = self._settings.model_dump(
            mode="json", exclude=hidden if self._served else {*hidden, "compare_loop"}
        )
        if self._served:
            values["server"] = server_decides(self._run)
        else:
            values["device"] = device_of(self.gpus)
        return {**values, "target": self._run.target_decides()}

    @property
    def environment(self) -> Mapping[str, str]:
        """Of the server, or of the loop's processes."""
        if self._served:
            return plan_environment(self._run, server_plans(self._run)["drafted"])
        return self._loop_environment

    @property
    def _loop_environment(self) -> Mapping[str, str]:
        """Of the decoding processes, which share the threads."""
        extra = {"OMP_NUM_THREADS": str(max(1, self._run.threads // self._settings.workers))}
        return self._run.environment(gpus=self.gpus, extra=extra)

    def check(self) -> int:
        """There is something to decode, and a server to decode it where one is wanted."""
        if self._served:
            known_interpreter(self._run)
            for plan in server_plans(self._run).values():
                plan_flags(self._run, plan)
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
            raise TooFew(
                f"{len(held_out)} held-out samples, none with a prompt",
                wanted="at least one held-out conversation",
                next_step="raise prepare.held_out_share, then make prepare",
            )
        return prompts[: self._settings.prompts or None]

    def run(self, workspace: Workspace) -> None:
        """Decodes every prompt plainly and drafted, by the server, by the loop, or by both."""
        prompts = self._prompts()
        _write_lines(workspace.output / _PROMPTS, prompts)
        if not self._served:
            self._decode_by_loop(workspace, prompts, into=_OUTCOMES)
            return
        served = decode_on_server(self._run, prompts, log=workspace.log)
        _write_lines(workspace.output / _OUTCOMES, [one.to_json() for one in served.outcomes])
        seconds = {"plain": served.plain_seconds, "drafted": served.drafted_seconds}
        write_json(workspace.output / _SERVERS, {"seconds": seconds, "servers": served.servers})
        if self._settings.compare_loop:
            self._decode_by_loop(workspace, prompts, into=_LOOP_OUTCOMES)

    def _decode_by_loop(
        self, workspace: Workspace, prompts: Sequence[Mapping[str, Any]], *, into: str
    ) -> None:
        """Decodes in one process or several, and keeps what they report, in the prompts' order."""
        for path in workspace.output.glob("part-*.jsonl"):
            path.unlink()  # of an earlier try, with more workers
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
        _write_lines(workspace.output / into, ordered)

    def _child(self, workspace: Workspace, prompts: Path) -> Child:
        request = {
            "target": str(self._run.target_folder),
            "drafter": str(self._run.output("export")),
            "prompts": str(prompts),
            "max_new_tokens": self._settings.max_new_tokens,
            "draft_tokens": self._settings.draft_tokens,
            "dtype": self._settings.compute_dtype,
            "threads": int(self._loop_environment["OMP_NUM_THREADS"]),
            "end_ids": sorted(self._run.end_of_turn_ids(self._run.tokenizer())),
            "device": device_of(self.gpus),
            "remote_code": self._run.settings.target.remote_code,
        }
        return Child(
            "pipeline.evaluation.worker",
            environment=child_environment(self._loop_environment),
            log=workspace.log,
            silence_seconds=self._run.settings.run.silence_seconds,
            request=request,
        )

    def verify(self, workspace: Workspace) -> Outcome:
        """Identical outputs in float32, the wanted acceptance length, and both ways agree."""
        decoded = _lines(workspace.output / _OUTCOMES)
        asked = _lines(workspace.output / _PROMPTS)
        measured: dict[str, Any] = {}
        if self._served:
            result, measured = self._server_result(workspace)
        else:
            result = self._loop_result(workspace.output / _OUTCOMES)
        write_json(workspace.output / ACCEPTANCE, result.to_json())
        _say(result)
        if not result.prompts == decoded == asked:
            raise NotProven(
                f"{asked} prompts, {decoded} outcomes, {result.prompts} counted",
                wanted="one outcome for every prompt",
                next_step="make evaluate starts over; if it stays so, report it",
            )
        self._want_identical(result)
        least = self._settings.least_acceptance_length
        if result.acceptance_length < least:
            raise TooLow(
                f"measured acceptance length {result.acceptance_length:.3f}",
                wanted=f"at least evaluate.least_acceptance_length, {least}",
                next_step="train longer or on more data; make report shows the curves",
            )
        return Outcome(
            counts={"prompts": result.prompts, "identical": result.identical},
            facts={"acceptance_length": result.acceptance_length, "tokens": result.tokens},
            measured={**result.to_json(), **measured},
            # They hold seconds, or what a server said of itself.
            volatile=lambda name: name != _PROMPTS,
        )

    def _loop_result(self, outcomes: Path) -> Acceptance:
        return summarise(_loop_outcomes(outcomes), draft_tokens=self._settings.draft_tokens)

    def _server_result(self, workspace: Workspace) -> tuple[Acceptance, dict[str, Any]]:
        """The server's own count, and what goes into the manifest about it and the loop's."""
        outcomes = [ServerOutcome.from_json(one) for one in _read(workspace.output / _OUTCOMES)]
        said = read_json(workspace.output / _SERVERS)
        result = summarise_server(
            outcomes,
            draft_tokens=self._settings.draft_tokens,
            plain_seconds=said["seconds"]["plain"],
            drafted_seconds=said["seconds"]["drafted"],
        )
        measured: dict[str, Any] = {"servers": said["servers"]}
        if self._settings.compare_loop:
            path = workspace.output / _LOOP_OUTCOMES
            self._want_identical(self._loop_result(path))
            both = agreement(
                outcomes, _loop_outcomes(path), draft_tokens=self._settings.draft_tokens
            )
            write_json(workspace.output / _AGREEMENT, both.to_json())
            measured["agreement"] = both.to_json()
            _want_agreement(both)
        return result, measured

    def _want_identical(self, result: Acceptance) -> None:
        difference = result.first_difference
        if difference is not None and self._settings.compute_dtype == "float32":
            raise NotProven(
                f"{result.prompts - result.identical} of {result.prompts} drafted outputs differ "
                f"from plain decoding; first: {difference}",
                wanted="the same tokens on every prompt in float32",
                next_step="gaps near 0 are ties that rounding decides; anything else is a fault "
                "of the loop or of the server: please report it with outcomes.jsonl",
            )


def _want_agreement(both: Agreement) -> None:
    SAY.info(
        "evaluate: acceptance length %.4f by the server, %.4f by the loop (%.2f %% apart); "
        "the same answers on %d of %d prompts",
        both.server,
        both.loop,
        100 * both.relative,
        both.same_answers,
        both.prompts,
    )
    if not both.holds:
        raise NotProven(
            f"acceptance length {both.server:.4f} by the server, {both.loop:.4f} by the loop, "
            f"{both.relative:.1%} apart",
            wanted=f"the same within {AGREEMENT:.0%}",
            next_step="the server may read the export otherwise than it was trained (layer ids, "
            "vocabulary map, norm): compare outcomes.jsonl with loop-outcomes.jsonl",
        )


def _read(path: Path) -> list[dict[str, Any]]:
    with named(path):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _loop_outcomes(path: Path) -> list[DecodedTwice]:
    return [DecodedTwice.from_json(one) for one in _read(path)]


def _write_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(value) + "\n" for value in values)
    write_atomic(path, text.encode())


def _lines(path: Path) -> int:
    with named(path):
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
