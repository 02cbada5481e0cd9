"""train: the drafter, by training-time test on the captured states."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.draft.config import DrafterConfig
from pipeline.draft.export import WEIGHTS_NAME, check_target, read_origin
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.report.metrics import read_training
from pipeline.settings.environment import child_environment
from pipeline.settings.model import DraftSettings
from pipeline.slate.child import Child
from pipeline.slate.files import read_json, sha256_file, sha256_json, write_json
from pipeline.slate.log import SAY
from pipeline.slate.manifest import Manifest
from pipeline.slate.progress import Progress
from pipeline.slate.stage import Outcome, Workspace
from pipeline.stages.errors import NotProven, StageError
from pipeline.stages.prepare import VOCABULARY
from pipeline.stages.run import Run, device_of
from pipeline.store.reader import StateDataset
from pipeline.target.facts import TargetFacts, fingerprint
from pipeline.training.checkpoint import Checkpoint, newest_complete, read_checkpoint
from pipeline.training.errors import CheckpointError
from pipeline.training.material import start_and_map
from pipeline.training.request import TrainRequest
from pipeline.training.start import plan_run

CHECKPOINTS = "checkpoints"
_REQUEST = "request.json"
_RESULT = "result.json"
_PLACE_ONLY = {"ranks", "gpus", "nccl", "checkpoint_every_steps", "keep_checkpoints", "warm_start"}
_MASTER_BYTES = 12  # weight, first and second moment, float32 each


def drafter_config(
    draft: DraftSettings, facts: TargetFacts, *, taps: tuple[int, ...]
) -> DrafterConfig:
    """The drafter's shape: what the profile says, the rest from the target.

    StageError when the profile asks for a position limit below the target's.
    """
    limit = draft.max_position_embeddings or facts.max_position_embeddings
    if limit < facts.max_position_embeddings:
        raise StageError(
            f"draft.max_position_embeddings is {limit}",
            wanted=f"at least the target's {facts.max_position_embeddings} positions: servers size "
            "the drafter's rotary table by it",
            next_step="set draft.max_position_embeddings to 0 (the target's) or higher",
        )
    return DrafterConfig(
        hidden_size=draft.hidden_size or facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        intermediate_size=draft.intermediate_size or facts.intermediate_size,
        heads=draft.heads or facts.heads,
        kv_heads=draft.kv_heads or facts.kv_heads,
        head_dim=draft.head_dim or facts.head_dim,
        draft_vocabulary_size=draft.vocabulary_size,
        target_vocabulary_size=facts.vocabulary_size,
        rope_theta=draft.rope_theta or facts.rope_theta,
        # A base of the drafter's own goes without the target's scaling, which belongs to its base.
        rope_scaling=None if draft.rope_theta else facts.rope_scaling,
        rms_norm_eps=facts.rms_norm_eps,
        max_position_embeddings=limit,
        norm_output=draft.norm_output,
        taps=taps,
    )


class TrainStage:
    """Trains in a child process, or one a GPU under torchrun."""

    name = "train"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._settings = run.settings.train

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPUs of the ranks."""
        return self._settings.gpus

    @property
    def inputs(self) -> Mapping[str, Path]:
        """States, draft vocabulary, and the target when it is made here."""
        return {
            **self._run.target_inputs(),
            "prepare": self._run.output("prepare"),
            "extract": self._run.output("extract"),
        }

    @property
    def decides(self) -> Mapping[str, Any]:
        """All that changes what is learned; not where it is computed."""
        return {
            **self._settings.model_dump(mode="json", exclude=_PLACE_ONLY),
            "warm_start": self._warm_digest(),
            "draft": self._run.settings.draft.model_dump(mode="json"),
            "target": self._run.target_decides(),
        }

    @property
    def environment(self) -> Mapping[str, str]:
        """Of the ranks: threads are shared out between those of one host."""
        threads = max(1, self._run.threads // self._settings.ranks)
        nccl = self._run.nccl("training", explicit=self._settings.nccl, gpus=self.gpus)
        extra = {**nccl, "OMP_NUM_THREADS": str(threads)}
        return self._run.environment(gpus=self.gpus, extra=extra)

    def _warm_digest(self) -> str | None:
        if self._settings.warm_start is None:
            return None
        weights = self._settings.warm_start / WEIGHTS_NAME
        if not weights.is_file():
            raise StageError(
                f"train.warm_start: {weights} does not exist",
                wanted="the folder of an exported drafter",
                next_step="correct train.warm_start, or leave it out to train afresh",
            )
        return sha256_file(weights)

    def _config(self) -> DrafterConfig:
        taps = tuple(self._run.settings.extract.taps)
        return drafter_config(self._run.settings.draft, self._run.target_facts(), taps=taps)

    def check(self) -> int:
        """Drafter, states, vocabulary and warm start belong together and can be exported."""
        config = self._config()
        check_target(config, self._run.target_facts(), config.taps)
        dataset = StateDataset.open(self._run.output("extract"))
        if dataset.taps != config.taps or dataset.hidden_size != config.target_hidden_size:
            raise StageError(
                f"the states have taps {list(dataset.taps)} of width {dataset.hidden_size}",
                wanted=f"taps {list(config.taps)} of width {config.target_hidden_size}",
                next_step="make extract with the present settings",
            )
        target = fingerprint(self._run.target_folder)
        if dataset.target_fingerprint != target:
            raise StageError(
                f"the states are of a target with fingerprint {dataset.target_fingerprint}",
                wanted=f"{target}, that of {self._run.target_folder}",
                next_step="make extract with the present target",
            )
        request = self._request(self._run.output(self.name), resume=False)
        _, vocabulary = start_and_map(request, config)
        if vocabulary.size != config.draft_vocabulary_size:
            raise StageError(
                f"the draft vocabulary has {vocabulary.size} tokens",
                wanted=f"draft.vocabulary_size, {config.draft_vocabulary_size}",
                next_step="set draft.vocabulary_size to it, or make prepare",
            )
        plan_run(dataset, request)
        if request.warm_start is not None:
            self._check_warm_start(request.warm_start, vocabulary, dataset.target_fingerprint)
        if self._settings.ranks > request.packs_per_step:
            SAY.warning(
                "train: a step has %d pack(s) for %d ranks: %d of them will only wait; raise "
                "train.tokens_per_step or lower train.tokens_per_pack",
                request.packs_per_step,
                self._settings.ranks,
                self._settings.ranks - request.packs_per_step,
            )
        checkpoints = self._settings.keep_checkpoints + 1  # the next is whole before one goes
        return checkpoints * _MASTER_BYTES * _parameters(config) + (64 << 20)

    def _check_warm_start(self, warm: Path, kept: DraftVocabulary, target: str) -> None:
        """StageError when its token ids mean other tokens; says what else it brings along."""
        origin = read_origin(warm)
        if origin is not None and origin.tokens != token_digest(self._run.tokenizer()):
            raise StageError(
                f"train.warm_start: {warm} was trained for a target with other tokens",
                wanted="the same token ids, which the drafter's head and map stand for",
                next_step="train afresh, without train.warm_start",
            )
        if origin is None or origin.target != target:
            SAY.warning("train: %s was trained for another target than these states are of", warm)
        prepared = DraftVocabulary.load(self._run.output("prepare") / VOCABULARY)
        missing = int((prepared.t2d & ~kept.t2d).sum())
        SAY.info(
            "train: warm start from %s, whose draft vocabulary is kept; %d of the %d tokens that "
            "make prepare chose are not in it",
            warm,
            missing,
            prepared.size,
        )

    def _request(self, output: Path, *, resume: bool) -> TrainRequest:
        settings = self._settings
        warm = settings.warm_start
        return TrainRequest(
            dataset=self._run.output("extract"),
            target=self._run.target_folder,
            output=output,
            drafter=self._config().to_json(),
            draft_vocabulary=None if warm else self._run.output("prepare") / VOCABULARY,
            warm_start=warm,
            resume=resume,
            steps=settings.ttt_steps,
            decay=settings.step_decay,
            loss=settings.loss,
            epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            final_learning_rate_share=settings.final_learning_rate_share,
            schedule=settings.schedule,
            warmup_share=settings.warmup_share,
            weight_decay=settings.weight_decay,
            betas=settings.betas,
            clip_norm=settings.clip_norm,
            tokens_per_pack=settings.tokens_per_pack,
            tokens_per_step=settings.tokens_per_step,
            seed=settings.seed,
            compute_dtype=settings.compute_dtype,
            reduce_dtype=settings.reduce_dtype,
            device=device_of(self.gpus),
            checkpoint_every_steps=settings.checkpoint_every_steps,
            keep_checkpoints=settings.keep_checkpoints,
            threads=int(self.environment["OMP_NUM_THREADS"]),
        )

    def run(self, workspace: Workspace) -> None:
        """Starts the ranks and shows what they report."""
        request = workspace.output / _REQUEST
        asked = self._request(workspace.output, resume=workspace.resume)
        write_json(request, asked.to_json())
        ranks = self._settings.ranks
        with Child(
            "pipeline.training.worker" if ranks == 1 else "pipeline.training.launch",
            argv=[str(request)] if ranks == 1 else [str(ranks), str(request)],
            environment=child_environment(self.environment),
            log=workspace.log,
            silence_seconds=self._run.settings.run.silence_seconds,
        ) as child:
            events = child.events()
            plan = _next(events, "plan")
            _say_plan(plan)
            with Progress(
                "train", total=plan["steps"], unit="steps", already=plan["resumed_at"]
            ) as progress:
                for event in events:
                    if event["event"] == "step":
                        note = (
                            f"loss {event['loss']:.3f} {event['tokens_per_second']:,.0f} tokens/s"
                        )
                        progress.advance(note=note)
                    elif event["event"] == "evaluation":
                        SAY.info("%s", _evaluation_line(event))
                    elif event["event"] == "data":
                        SAY.warning("%s", event["line"])
                    elif event["event"] == "done":
                        write_json(workspace.output / _RESULT, event)

    def verify(self, workspace: Workspace) -> Outcome:
        """The last checkpoint is complete and is the last step's."""
        result = read_json(workspace.output / _RESULT)
        checkpoint = final_checkpoint(workspace.output)
        if checkpoint.position.step != result["steps"]:
            raise StageError(
                f"the newest complete checkpoint is of step {checkpoint.position.step}",
                wanted=f"step {result['steps']}, the last",
                next_step="make train RESUME=1",
            )
        held_out = result["held_out"] or {}
        _say_if_worse(workspace.output)
        return Outcome(
            counts={"steps": result["steps"], "tokens": result["tokens"]},
            facts={
                "loss": result["loss"],
                "held_out": {
                    key: held_out.get(key) for key in ("accuracy", "overlap", "acceptance_length")
                },
                "checkpoint": checkpoint.folder.name,
                "taps": list(self._run.settings.extract.taps),
            },
            volatile=lambda name: not name.startswith(f"{CHECKPOINTS}/{checkpoint.folder.name}/"),
        )


def final_checkpoint(output: Path) -> Checkpoint:
    """The newest complete checkpoint of a train output. StageError when there is none."""
    checkpoint, passed_over = newest_complete(output / CHECKPOINTS)
    for name, why in passed_over:
        SAY.warning("checkpoint %s passed over: %s", name, why)
    if checkpoint is None:
        raise StageError(
            f"{output / CHECKPOINTS} holds no complete checkpoint",
            wanted="at least one",
            next_step="make train",
        )
    return checkpoint


def sealed_checkpoint(output: Path) -> Checkpoint:
    """The checkpoint that a sealed train output ends with. StageError when it cannot be read.

    An older one that is whole is never taken in its place.
    """
    try:
        return read_checkpoint(
            output / CHECKPOINTS / str(Manifest.read(output).facts["checkpoint"])
        )
    except CheckpointError as error:
        raise StageError(
            error.found,
            wanted="the checkpoint that training was sealed with",
            next_step="look at the disk (dmesg -T), then the same command; if it stays broken: "
            "make train",
        ) from error


def token_digest(tokenizer: Any) -> str:
    """Digest of which token every id of a tokenizer stands for."""
    return sha256_json(sorted(tokenizer.get_vocab().items()))


def _say_if_worse(output: Path) -> None:
    """Warns when the held-out loss is higher at the end than before the first step."""
    losses = [point.loss for point in read_training(output / "metrics.jsonl").held_out]
    if losses and losses[-1] > losses[0]:
        SAY.warning(
            "train: the held-out loss rose from %.3f to %.3f: the drafter is worse than before the "
            "first step (lower train.learning_rate?)",
            losses[0],
            losses[-1],
        )


def _parameters(config: DrafterConfig) -> int:
    H, inner, D = config.hidden_size, config.intermediate_size, config.draft_vocabulary_size
    attention = 2 * H * (config.query_width + 2 * config.kv_width) + config.query_width * H
    return 3 * config.target_hidden_size * H + attention + 3 * H * inner + D * H + 4 * H


def _next(events: Any, kind: str) -> dict[str, Any]:
    event: dict[str, Any] = next(events)
    if event.get("event") != kind:
        raise NotProven(
            f"the trainer's first event is {event!r:.120}",
            wanted=f"the event {kind}",
            next_step="this is a fault of the trainer: please report it with the log",
        )
    return event


def _say_plan(plan: Mapping[str, Any]) -> None:
    SAY.info(
        "train: %d samples, %d tokens, %d held out; %d steps, %d of them warm-up; %.1f M "
        "parameters on %d rank(s)",
        plan["samples"],
        plan["tokens"],
        plan["held_out_samples"],
        plan["steps"],
        plan["warmup_steps"],
        plan["parameters"] / 1e6,
        plan["world"],
    )
    if not plan["held_out_samples"]:
        SAY.warning("train: no held-out sample: nothing will show whether the drafter learns")
    for name, why in plan["passed_over"]:
        SAY.warning("train: checkpoint %s passed over: %s", name, why)
    if plan["resumed_at"]:
        SAY.info("train: resumed after step %d", plan["resumed_at"])


def _evaluation_line(event: Mapping[str, Any]) -> str:
    accuracy = "/".join("-" if a is None else f"{a:.3f}" for a in event["accuracy"])
    length = event["acceptance_length"]
    shown = "-" if length is None else f"{length:.3f}"
    return (
        f"train: step {event['step']}, epoch {event['epoch']}: held-out accuracy {accuracy}, "
        f"estimated acceptance length {shown}"
    )
