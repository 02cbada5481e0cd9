"""Held-out prompts answered by the real server, without the drafter and with it."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.capture.sglang_generate import Generated, Limits, Prompt, generate
from pipeline.evaluation.acceptance import Outcome as DecodedTwice
from pipeline.evaluation.acceptance import summarise
from pipeline.evaluation.sglang_counts import (
    Agreement,
    ServerOutcome,
    read_counts,
    server_outcome,
    summarise_server,
)
from pipeline.slate.log import SAY
from pipeline.slate.progress import Progress
from pipeline.stages.run import Run
from pipeline.stages.server import Drafting, ServerPlan, check_running, make_server


@dataclass(frozen=True)
class ServerRun:
    """All prompts on both servers, what each server said of itself, and each one's wall time."""

    outcomes: tuple[ServerOutcome, ...]
    servers: Mapping[str, Any]
    plain_seconds: float
    drafted_seconds: float


def server_plans(run: Run) -> dict[str, ServerPlan]:
    """The two servers that an evaluation compares, equal but for the drafter."""
    settings = run.settings.evaluate
    drafting = Drafting(run.output("export"), settings.draft_tokens)
    return {
        "plain": ServerPlan(settings.compute_dtype, settings.gpus),
        "drafted": ServerPlan(settings.compute_dtype, settings.gpus, drafting=drafting),
    }


def decode_on_server(run: Run, prompts: Sequence[Mapping[str, Any]], *, log: Path) -> ServerRun:
    """Answers every prompt ({"id", "prompt_ids"}) greedily on a plain and on a drafting server.

    The two run one after the other: on GPUs there is room for one. Faults of the server, and
    EvaluationError where its counters contradict themselves, end it.
    """
    answers: dict[str, list[Generated]] = {}
    seconds: dict[str, float] = {}
    servers: dict[str, Any] = {}
    for name, plan in server_plans(run).items():
        SAY.info("evaluate: the %s server", name)
        with make_server(run, plan, log=log, name=f"server-{name}") as server:
            servers[name] = check_running(server, plan)
            # The first calls cost more than later ones; they are not timed.
            _answer(run, server, prompts[:1], label="")
            started = time.perf_counter()
            answers[name] = _answer(run, server, prompts, label=f"evaluate: {name}")
            seconds[name] = time.perf_counter() - started
    draft_tokens = run.settings.evaluate.draft_tokens
    outcomes = tuple(
        server_outcome(
            plain.prompt.id,
            len(plain.prompt.input_ids),
            plain_ids=plain.output_ids,
            drafted_ids=drafted.output_ids,
            counts=read_counts(drafted.meta, draft_tokens=draft_tokens),
        )
        for plain, drafted in zip(answers["plain"], answers["drafted"], strict=True)
    )
    return ServerRun(outcomes, servers, seconds["plain"], seconds["drafted"])


def _answer(
    run: Run, server: Any, prompts: Sequence[Mapping[str, Any]], *, label: str
) -> list[Generated]:
    settings = run.settings
    limits = Limits(
        max_new_tokens=settings.evaluate.max_new_tokens,
        end_ids=run.end_of_turn_ids(run.tokenizer()),
        concurrency=min(settings.extract.server.max_running_requests, len(prompts)),
        timeout_seconds=settings.extract.server.request_timeout_seconds,
    )
    asked = (Prompt(prompt["id"], tuple(prompt["prompt_ids"])) for prompt in prompts)
    with closing(generate(server, asked, limits=limits)) as answers:
        if not label:
            return list(answers)
        found = []
        with Progress(label, total=len(prompts), unit="prompts") as progress:
            for answer in answers:
                found.append(answer)
                progress.advance()
    return found


def agreement(
    served: Sequence[ServerOutcome], looped: Sequence[DecodedTwice], *, draft_tokens: int
) -> Agreement:
    """Both ways of counting over the same prompts, in the same order. ValueError when they are not.

    EvaluationError when no prompt needed a decode pass.
    """
    if [one.prompt for one in served] != [one.prompt for one in looped]:
        raise ValueError("the server and the loop answered other prompts")
    server = summarise_server(
        served, draft_tokens=draft_tokens, plain_seconds=0.0, drafted_seconds=0.0
    )
    loop = summarise(looped, draft_tokens=draft_tokens)
    return Agreement(
        server=server.acceptance_length,
        loop=loop.acceptance_length,
        server_passes=server.passes,
        loop_passes=loop.passes,
        prompts=len(served),
        same_answers=sum(
            one.drafted_ids == other.plain_ids for one, other in zip(served, looped, strict=True)
        ),
    )
