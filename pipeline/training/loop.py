"""A whole run: start or resume, step after step, evaluate, keep checkpoints, say what happens."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pipeline.training.batches import PackOrder, packs_ahead
from pipeline.training.checkpoint import Position, prune, sweep, write_checkpoint
from pipeline.training.errors import TrainingError
from pipeline.training.held_out import evaluate
from pipeline.training.metrics import MetricsLog, summary
from pipeline.training.ranks import Ranks, join_ranks
from pipeline.training.request import TrainRequest
from pipeline.training.start import Run, start_run
from pipeline.training.step import run_step

Emit = Callable[[Mapping[str, Any]], None]
_DATA_SECONDS = 30.0  # over which waiting for data is judged


def train(request: TrainRequest, emit: Emit) -> None:
    """Trains as asked; on rank 0 `emit` gets plan, step, evaluation, data, checkpoint, done.

    Leaves output/checkpoints/step-*, metrics.jsonl and tensorboard/. Under torchrun every rank
    calls this. Errors: TrainingError and the faults of draft, store and target.
    """
    torch.set_num_threads(request.threads)
    with join_ranks(request.device) as ranks:
        run, passed_over = ranks.together(lambda: start_run(request, ranks), doing="start")
        if not ranks.same(run.done_steps):
            raise TrainingError(
                f"rank {ranks.rank} would resume at step {run.done_steps}, another rank elsewhere",
                wanted="one view of the checkpoints on all ranks",
                next_step="give all ranks the same output folder",
            )
        if ranks.rank:
            _train(run, ranks, emit=lambda _: None, log=None)
            return
        log = _open_log(run)
        try:
            lacking = run.done_steps - log.kept_steps
            emit(_plan_event(run, ranks, passed_over=passed_over, lacking=lacking))
            _train(run, ranks, emit=emit, log=log)
        finally:
            log.close()


def _open_log(run: Run) -> MetricsLog:
    """The metrics of rank 0, cut back to the step the run goes on from."""
    run.request.output.mkdir(parents=True, exist_ok=True)
    sweep(run.request.output / "checkpoints")
    return MetricsLog(run.request.output, resumed_at=run.done_steps)


def _plan_event(
    run: Run, ranks: Ranks, *, passed_over: list[tuple[str, str]], lacking: int
) -> Mapping[str, Any]:
    """passed_over: newer checkpoints, with reasons; lacking: steps done without a metrics line."""
    plan = run.plan
    return {
        "event": "plan",
        "steps": run.schedule.total_steps,
        "warmup_steps": run.schedule.warmup_steps,
        "steps_per_epoch": plan.steps_per_epoch(),
        "samples": len(plan.samples),
        "tokens": int(plan.lengths[plan.samples].sum()),
        "held_out_samples": 0 if run.held_out is None else len(run.held_out.order),
        "parameters": run.optimizer.parameters,
        "world": ranks.world,
        "resumed_at": run.done_steps,
        "steps_without_metrics": lacking,
        "passed_over": [list(pair) for pair in passed_over],
    }


def _orders(run: Run, ranks: Ranks) -> Iterator[PackOrder]:
    """This rank's packs of all steps to come; the first of a step also weighs the whole step."""
    for _, step, packing in run.plan.from_step(run.done_steps):
        whole = tuple(packing.step_packs(step))
        for number, samples in enumerate(whole[ranks.rank :: ranks.world]):
            yield PackOrder(samples, weigh=whole if number == 0 else ())


def _train(run: Run, ranks: Ranks, *, emit: Emit, log: MetricsLog | None) -> None:
    """The steps that are left. log: rank 0's."""
    request, total = run.request, run.schedule.total_steps
    before = {} if run.resumed is None else run.resumed.outcome
    tokens, loss, held_out = before.get("tokens", 0), before.get("loss"), before.get("held_out")
    latest = "" if run.resumed is None else str(run.resumed.folder)

    def note(event: Mapping[str, Any]) -> None:
        """Writes an event down and sends it; a full disk here stops all ranks."""

        def write() -> None:
            if log is not None:
                log.write(event)

        ranks.together(write, doing="writing metrics.jsonl")
        emit(event)

    def measure(step: int, epoch: int) -> Mapping[str, Any] | None:
        if run.held_out is None:
            return None
        start = time.perf_counter()
        rates = evaluate(run.computation, run.held_out, step=step, reader=run.reader, ranks=ranks)
        seconds = time.perf_counter() - start
        note({"event": "evaluation", "step": step, "epoch": epoch, **rates, "seconds": seconds})
        return rates

    if run.resumed is None:
        held_out = measure(0, 0)
    step, judged = run.done_steps, time.perf_counter()
    with packs_ahead(run.reader, _orders(run, ranks)) as packs:
        for epoch, number, packing in run.plan.from_step(step):
            start = time.perf_counter()
            step += 1
            rate = run.schedule.rate(step)
            result = run_step(
                run.computation,
                run.optimizer,
                step=step,
                mine=packing.step_packs(number, rank=ranks.rank, world=ranks.world),
                packs=packs,
                reader=run.reader,
                ranks=ranks,
                learning_rate=rate,
                clip_norm=request.clip_norm,
            )
            seconds = time.perf_counter() - start
            tokens, loss = tokens + result.tokens, result.loss
            event = {
                "event": "step",
                "step": step,
                "epoch": epoch,
                "learning_rate": rate,
                "loss": loss,
                "gradient_norm": result.gradient_norm,
                "weight": result.weight,
                "updated": result.updated,
                "tokens": result.tokens,
                "tokens_per_second": result.tokens / seconds,
                "seconds": seconds,
                **summary(result.metrics),
            }
            note(event)
            if time.perf_counter() - judged > _DATA_SECONDS or step == total:
                judged, line = time.perf_counter(), packs.flow().line()
                if line is not None:
                    emit({"event": "data", "step": step, "line": line})
            every = request.checkpoint_every_steps
            ends, keeps = number + 1 == packing.steps, bool(every and step % every == 0)
            if ends:
                held_out = measure(step, epoch + 1)
            if step == total or keeps:
                outcome = {"tokens": tokens, "loss": loss, "held_out": held_out}
                position = Position(step, epoch, number + 1)
                latest = _checkpoint(run, ranks, position=position, outcome=outcome, log=log)
                emit({"event": "checkpoint", "step": step, "folder": latest})
            if ends or keeps:
                packs.flow()  # data came meanwhile; a new stretch begins
                judged = time.perf_counter()
    emit(
        {
            "event": "done",
            "steps": total,
            "tokens": tokens,
            "loss": loss,
            "held_out": held_out,
            "checkpoint": latest,
        }
    )


def _checkpoint(
    run: Run,
    ranks: Ranks,
    *,
    position: Position,
    outcome: Mapping[str, Any],
    log: MetricsLog | None,
) -> str:
    """Rank 0 writes and prunes; all ranks look that they still hold the same weights."""
    if not ranks.same(run.optimizer.mark()):
        raise TrainingError(
            f"step {position.step}: rank {ranks.rank} holds other weights than its peers",
            wanted="the same weights on every rank",
            next_step="check the GPUs (dmesg, ECC counters), then make train RESUME=1",
        )
    folder = run.request.output / "checkpoints"
    masters, state = run.optimizer.gather()  # by all ranks; only rank 0 gets something

    def write() -> str:
        if log is None:
            return ""
        log.sync()
        path = write_checkpoint(
            folder,
            position=position,
            seed=run.request.seed,
            model=masters,
            optimizer=state,
            vocabulary=run.computation.vocabulary,
            data=run.data,
            settings=run.request.mathematics(),
            drafter=run.computation.model.config.to_json(),
            outcome=outcome,
        )
        prune(folder, newest=position.step, keep=run.request.keep_checkpoints)
        return str(path)

    return ranks.together(write, doing=f"checkpoint of step {position.step}")
