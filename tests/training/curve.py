"""A short training, dense in float64 by autograd and torch's AdamW, and by this project's parts."""

import dataclasses
import math

import torch
from torch import Tensor

from pipeline.draft.config import DrafterConfig
from pipeline.draft.ttt import Frozen, Pack, pack_loss
from pipeline.training.optimizer import MasterAdamW
from pipeline.training.ranks import Ranks
from tests.draft.make import Rows, make_config, make_drafter, make_rows
from tests.draft.reference import dense_loss

CONFIG = make_config(
    hidden_size=32, target_hidden_size=32, intermediate_size=48, head_dim=16, heads=2, kv_heads=1,
    draft_vocabulary_size=24, target_vocabulary_size=40,
)  # fmt: skip
BETAS, RATE, CLIP = (0.9, 0.95), 3e-3, 1.0
PACKS, UPDATES, STEPS = 3, 36, 3


def material(config: DrafterConfig) -> tuple[list[Rows], tuple[Tensor, Tensor, object]]:
    """A few packs, seen again and again, in numbers that bfloat16 holds."""
    made = [
        make_rows(config, [14, 9], [j % 7 > 2 for j in range(23)], seed=seed)
        for seed in range(PACKS)
    ]
    _, embedding, head, vocabulary = made[0]

    def held(tensor: Tensor) -> Tensor:
        return tensor.bfloat16().double()

    rows = [
        dataclasses.replace(one[0], taps=held(one[0].taps), final=held(one[0].final))
        for one in made
    ]
    return rows, (held(embedding), held(head), vocabulary)


def dense_curve() -> list[float]:
    """Losses of all updates, from formulas alone."""
    packs, (embedding, head, vocabulary) = material(CONFIG)
    model = make_drafter(CONFIG)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    adam = torch.optim.AdamW(weights.values(), lr=RATE, betas=BETAS, eps=1e-8, weight_decay=0.0)
    losses = []
    for update in range(UPDATES):
        rows = packs[update % PACKS]
        fields = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
        loss, weight, _ = dense_loss(
            weights, CONFIG, **fields, embedding=embedding, teacher_head=head,
            target_ids=vocabulary.target_ids, steps=STEPS, decay=0.8,
        )  # fmt: skip
        adam.zero_grad()
        (loss / weight).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        adam.step()
        losses.append(float(loss.detach()) / weight)
    return losses


def fast_curve(device: str, dtype: torch.dtype) -> list[float]:
    """The same by pack_loss and MasterAdamW."""
    packs, (embedding, head, vocabulary) = material(CONFIG)
    there = torch.device(device)
    optimizer = MasterAdamW(
        make_drafter(CONFIG).float(), dtype=dtype, ranks=Ranks(0, 1, there), betas=BETAS,
        weight_decay=0.0,
    )  # fmt: skip
    frozen = Frozen.of(embedding.to(there, dtype), head.to(there, dtype), vocabulary)
    losses = []
    for update in range(UPDATES):
        rows = packs[update % PACKS]
        cast = dataclasses.replace(rows, taps=rows.taps.to(dtype), final=rows.final.to(dtype))
        pack = cast.pack(steps=STEPS)
        pack = Pack(
            pack.plan.to(there), pack.ids.to(there), pack.taps.to(there), pack.final.to(there)
        )
        result = pack_loss(
            optimizer.weights, pack, config=CONFIG, frozen=frozen, gradients=optimizer.gradients,
            scale=1 / pack.plan.weight, fresh=True, finished=optimizer.reduce,
        )  # fmt: skip
        report = optimizer.step(RATE, clip_norm=CLIP, sums=result.loss.double().view(1)).wait()
        optimizer.settle(updated=math.isfinite(float(report.sum())))
        losses.append(float(report[1]) / pack.plan.weight)
    return losses
