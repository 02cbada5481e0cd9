"""The start of a run: what it is made of, its plan, and the checkpoint it goes on from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeline.draft.ttt import Frozen
from pipeline.store.reader import StateDataset
from pipeline.training.batches import PackReader
from pipeline.training.checkpoint import Checkpoint, newest_complete
from pipeline.training.errors import CheckpointError
from pipeline.training.material import Material, load_material, require_labels
from pipeline.training.optimizer import MasterAdamW
from pipeline.training.packs import Packing, Plan, pack_in_order
from pipeline.training.ranks import Ranks
from pipeline.training.request import TrainRequest
from pipeline.training.schedule import Schedule, warmup_steps
from pipeline.training.step import Computation

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Run:
    """Everything one rank needs; the same plan and the same start on every rank."""

    request: TrainRequest
    data: Mapping[str, Any]
    plan: Plan
    held_out: Packing | None
    schedule: Schedule
    computation: Computation
    optimizer: MasterAdamW
    reader: PackReader
    resumed: Checkpoint | None

    @property
    def done_steps(self) -> int:
        """Optimizer steps that were done before this process."""
        return 0 if self.resumed is None else self.resumed.position.step


def start_run(request: TrainRequest, ranks: Ranks) -> tuple[Run, list[tuple[str, str]]]:
    """This rank's part of a run, and checkpoints that were passed over; talks to no other rank."""
    material = load_material(request)
    plan, held_out, schedule = plan_run(material.dataset, request)
    resumed, passed_over = _find_checkpoint(request, material)
    dtype = _DTYPES[request.compute_dtype]
    model = material.drafter(request.seed)
    optimizer = MasterAdamW(
        model,
        dtype=dtype,
        ranks=ranks,
        betas=request.betas,
        weight_decay=request.weight_decay,
        reduce_dtype=_DTYPES[request.reduce_dtype],
    )
    if resumed is not None:
        optimizer.restore(resumed.model()[0], state=resumed.optimizer())
    computation = Computation(
        model,
        optimizer.weights,
        Frozen.of(
            material.embedding.to(ranks.device),
            material.teacher_head.to(ranks.device, dtype),
            material.vocabulary,
        ),
        material.vocabulary,
        request.steps,
        request.loss,
    )
    reader = PackReader(
        material.dataset,
        dtype=dtype,
        vocabulary_size=material.vocabulary.target_size,
        steps=request.steps,
        decay=request.decay,
        device=ranks.device,
    )
    run = Run(
        request,
        material.data,
        plan,
        held_out,
        schedule,
        computation,
        optimizer,
        reader,
        resumed,
    )
    return run, passed_over


def plan_run(dataset: StateDataset, request: TrainRequest) -> tuple[Plan, Packing | None, Schedule]:
    """Training samples with something supervised, planned; held-out samples; every step's rate.

    NothingToTrain when no row would be asked for anything; RequestError of the schedule.
    """
    require_labels(dataset)
    entries = dataset.entries
    lengths = np.fromiter((e.length for e in entries), np.int64, len(entries))
    supervised = np.fromiter((e.supervised > 0 for e in entries), bool, len(entries))
    training = np.fromiter((e.split == "train" for e in entries), bool, len(entries))
    plan = Plan(
        samples=np.flatnonzero(training & supervised),
        lengths=lengths,
        tokens_per_pack=request.tokens_per_pack,
        packs_per_step=request.packs_per_step,
        epochs=request.epochs,
        seed=request.seed,
    )
    total = sum(plan.steps_per_epoch())
    schedule = Schedule(
        peak=request.learning_rate,
        final_share=request.final_learning_rate_share,
        warmup_steps=warmup_steps(request.warmup_share, total_steps=total),
        total_steps=total,
        shape=request.schedule,
    )
    others = np.flatnonzero(~training & supervised)
    if not len(others):
        return plan, None, schedule
    held_out = pack_in_order(
        others, lengths, tokens_per_pack=request.tokens_per_pack, packs_per_step=1
    )
    return plan, held_out, schedule


def _find_checkpoint(
    request: TrainRequest, material: Material
) -> tuple[Checkpoint | None, list[tuple[str, str]]]:
    """The checkpoint to go on from (None: start from nothing), and those passed over with reasons.

    ResumeRefused when it is of other data or settings; CheckpointError when a new run would write
    among the checkpoints of an old one, or when all that there is to resume from is broken.
    """
    folder = request.output / "checkpoints"
    if not request.resume:
        if folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir()):
            raise CheckpointError(
                f"{folder}: holds checkpoints of an earlier run",
                wanted="an empty output, or RESUME=1",
                next_step="make train (starts clean), or make train RESUME=1 (goes on)",
            )
        return None, []
    found, passed_over = newest_complete(folder)
    if found is not None:
        found.refuse_other(data=material.data, settings=request.mathematics())
    elif passed_over:
        raise CheckpointError(
            f"{folder}: no complete checkpoint: "
            + "; ".join(f"{name}: {why}" for name, why in passed_over),
            wanted="at least one complete checkpoint to resume from",
            next_step="start over without RESUME=1: make train",
        )
    return found, passed_over
