"""Loss and accuracy on samples that are never trained on."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from pipeline.draft.ttt import StepMetrics
from pipeline.training.batches import PackOrder, PackReader, packs_ahead
from pipeline.training.errors import NonFinite
from pipeline.training.metrics import summary
from pipeline.training.packs import Packing
from pipeline.training.ranks import Ranks
from pipeline.training.step import Computation


def evaluate(
    computation: Computation, packing: Packing, *, step: int, reader: PackReader, ranks: Ranks
) -> Mapping[str, Any]:
    """Weighted mean loss and the rates of `summary` over a packing, dealt to ranks in turn.

    Gives JSON values: loss (None when nothing is supervised), samples, and those of `summary`.
    step: optimizer steps done. NonFinite names it and the pack. The weights do not change.
    """
    packs = [packing.samples(pack) for pack in range(ranks.rank, packing.packs, ranks.world)]

    def work() -> torch.Tensor:
        sums = torch.zeros(5, computation.steps, dtype=torch.float64, device=ranks.device)
        losses, weight = [sums.new_zeros(())], 0.0
        orders = [PackOrder(samples) for samples in packs]
        with packs_ahead(reader, orders) as ready_packs:
            for ready in ready_packs:
                result = computation.loss(ready.pack)
                losses.append(result.loss.double())
                weight += result.weight
                sums += result.sums
        found = torch.stack(losses).cpu()  # the device is waited for once
        for samples, value in zip(packs, found[1:].tolist(), strict=True):
            if not math.isfinite(value):
                raise NonFinite(
                    f"step {step}: loss {value} on held-out samples "
                    f"{reader.names(samples, most=20)}",
                    wanted="a finite loss",
                    next_step="check these samples' states: make verify",
                )
        scalars = torch.stack([found.sum(), torch.tensor(weight, dtype=torch.float64)])
        return torch.cat([scalars, sums.cpu().flatten()])

    total = ranks.sum(ranks.together(work, doing="evaluation on held-out samples"))
    loss, weight = total[:2].tolist()
    rates = summary(StepMetrics.from_tensor(total[2:].view(5, -1)))
    return {"loss": loss / weight if weight else None, "samples": len(packing.order), **rates}
