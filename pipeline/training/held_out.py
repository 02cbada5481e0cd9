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
    computation: Computation, packing: Packing, *, reader: PackReader, ranks: Ranks
) -> Mapping[str, Any]:
    """Weighted mean loss and the rates of `summary` over a packing, dealt to ranks in turn.

    Gives JSON values: loss (None when nothing is supervised), samples, and those of `summary`.
    NonFinite names the pack. The weights do not change.
    """
    packs = [packing.samples(pack) for pack in range(ranks.rank, packing.packs, ranks.world)]

    def work() -> torch.Tensor:
        metrics, loss, weight = StepMetrics.zeros(computation.steps), 0.0, 0.0
        orders = [PackOrder(samples) for samples in packs]
        with torch.no_grad(), packs_ahead(reader, orders) as ready_packs:
            for ready in ready_packs:
                result = computation.loss(ready.pack)
                value = float(result.loss.detach())
                if not math.isfinite(value):
                    raise NonFinite(
                        f"loss {value} on held-out samples {reader.names(ready.samples, most=20)}",
                        wanted="a finite loss",
                        next_step="check these samples' states: make verify",
                    )
                metrics, loss, weight = (
                    metrics + result.metrics,
                    loss + value,
                    weight + result.weight,
                )
        scalars = torch.tensor([loss, weight], dtype=torch.float64)
        return torch.cat([scalars, metrics.to_tensor().flatten()])

    total = ranks.sum(ranks.together(work, doing="evaluation on held-out samples"))
    loss, weight = total[:2].tolist()
    rates = summary(StepMetrics.from_tensor(total[2:].view(5, -1)))
    return {"loss": loss / weight if weight else None, "samples": len(packing.order), **rates}
