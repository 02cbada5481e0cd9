"""Answers written by the target for prepare: by a child of this project, or by SGLang."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from pipeline.capture.sglang_generate import Generated
from pipeline.conversations.normalise import Skip
from pipeline.conversations.server_answers import AnswerRequest, plan_answers, write_answers
from pipeline.settings.environment import child_environment
from pipeline.slate.child import Child
from pipeline.slate.log import SAY, log_only
from pipeline.slate.progress import Progress
from pipeline.stages.run import Run
from pipeline.stages.server import ServerPlan, check_running, make_server


def answer_in_child(
    run: Run, request: AnswerRequest, *, log: Path, environment: Mapping[str, str]
) -> None:
    """Lets the transformers engine answer every prompt that has no answer yet."""
    values = {
        "folder": str(request.folder),
        "prompts": str(request.prompts),
        "out": str(request.out),
        "batch_size": run.settings.prepare.answering.batch_size,
        "max_new_tokens": request.max_new_tokens,
        "dtype": request.dtype,
        "threads": run.threads,
        "end_of_turn_ids": sorted(request.end_of_turn_ids),
        "remote_code": run.settings.target.remote_code,
    }
    with (
        Child(
            "pipeline.conversations.answer_worker",
            environment=child_environment(environment),
            log=log,
            silence_seconds=run.settings.run.silence_seconds,
            request=values,
        ) as child,
        ExitStack() as shown,
    ):
        events = (event for event in child.events() if event["event"] == "batch")
        first = next(events)
        done = first["done"]
        label = "prepare: the target answers"
        progress = shown.enter_context(
            Progress(label, total=first["total"], unit="prompts", already=done)
        )
        for event in events:
            progress.advance(event["done"] - done)
            done = event["done"]


def answering_plan(run: Run) -> ServerPlan:
    """How the target is served while it writes answers."""
    answering = run.settings.prepare.answering
    return ServerPlan(answering.compute_dtype, answering.gpus)


def answer_on_server(run: Run, request: AnswerRequest, *, log: Path) -> dict[str, Skip]:
    """Lets the server answer every prompt that has no answer yet; starts none when all have one.

    Gives, by prompt, why it got no answer.
    """
    plan, tokenizer, served = answering_plan(run), run.tokenizer(), run.settings.extract.server
    unanswered = plan_answers(request, tokenizer)
    if not unanswered.left:
        SAY.info("prepare: all %d prompts are answered already", unanswered.done)
        return {}
    tokens = cut = 0
    with make_server(run, plan, log=log) as server:
        log_only(f"the server: {check_running(server, plan)}")
        with Progress(
            "prepare: the server answers",
            total=len(unanswered.prompts),
            unit="prompts",
            already=unanswered.done,
        ) as progress:

            def advance(answer: Generated) -> None:
                nonlocal tokens, cut
                tokens += len(answer.output_ids)
                cut += answer.finish_reason == "length"
                progress.advance(note=f"{tokens:,} tokens, {cut} cut")

            return write_answers(
                unanswered,
                server,
                tokenizer,
                concurrency=min(served.max_running_requests, len(unanswered.left)),
                timeout_seconds=served.request_timeout_seconds,
                advance=advance,
            )
