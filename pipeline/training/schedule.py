"""The learning rate of each optimizer step: warm-up, then decay that ends at the last step."""

import math
from dataclasses import dataclass
from typing import Literal

from pipeline.training.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up from 0 to `peak` over `warmup_steps`, then decay to peak * final_share.

    Steps count from 1. The peak is reached at step warmup_steps, the end exactly at step
    total_steps. RequestError when the warm-up leaves no step for the end, or no step has a rate
    above 0.
    """

    peak: float
    final_share: float
    warmup_steps: int
    total_steps: int
    shape: Literal["cosine", "linear"]

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.total_steps:
            raise RequestError(
                f"train: {self.warmup_steps} warm-up steps of {self.total_steps} in all",
                wanted="at least one step after the warm-up",
                next_step="lower warmup_share, or train on more samples or epochs",
            )
        if self.total_steps == 1 and self.final_share == 0:
            raise RequestError(
                "train: one step in all, which is the last, and a final learning rate of 0",
                wanted="at least one step with a learning rate above 0",
                next_step="raise final_learning_rate_share, lower tokens_per_step, or train on "
                "more samples or epochs",
            )

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step 1..total_steps. ValueError outside."""
        if not 1 <= step <= self.total_steps:
            raise ValueError(f"step {step} outside 1..{self.total_steps}")
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        final = self.peak * self.final_share
        if step == self.total_steps:  # exact, whatever cos rounds to
            return final
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        left = (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return final + (self.peak - final) * left


def warmup_steps(share: float, *, total_steps: int) -> int:
    """Whole warm-up steps of a share of all steps; the last step always stays outside."""
    return min(round(share * total_steps), total_steps - 1)
