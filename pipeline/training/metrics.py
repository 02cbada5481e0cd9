"""What a run writes down about itself: one JSON line a step, the same numbers for TensorBoard."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.draft.ttt import StepMetrics
from pipeline.settings.strict_json import parse_json
from pipeline.slate.files import named, write_atomic

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def summary(metrics: StepMetrics) -> dict[str, Any]:
    """Rates out of sums, as JSON values; a rate over nothing is None.

    accuracy, overlap, outside [K]: shares of the step's supervised pairs. loss_by_step [K]: mean
    unweighted loss. count [K]. acceptance_length: 1 + a_0 + a_0 a_1 + ..., None without a pair.
    """
    count = metrics.count.tolist()
    accuracy = _shares(metrics.correct.tolist(), count)
    return {
        "accuracy": accuracy,
        "acceptance_length": acceptance_length(accuracy),
        "overlap": _shares(metrics.overlap.tolist(), count),
        "outside": _shares(metrics.outside.tolist(), count),
        "loss_by_step": _shares(metrics.loss.tolist(), count),
        "count": [round(n) for n in count],
    }


def acceptance_length(accuracy: list[float | None]) -> float | None:
    """Estimated tokens a target pass: 1 + a_0 + a_0 a_1 + ...; None when a_0 is unknown."""
    if not accuracy or accuracy[0] is None:
        return None
    length = reached = 1.0
    for rate in accuracy:
        if rate is None:
            break
        reached *= rate
        length += reached
    return length


def _shares(sums: list[float], counts: list[float]) -> list[float | None]:
    return [value / n if n else None for value, n in zip(sums, counts, strict=True)]


class MetricsLog:
    """metrics.jsonl and tensorboard/ of one run; only rank 0 has one.

    resumed_at: number of steps done before; lines of later steps, and a line cut by a kill, are
    dropped, so that no step appears twice. 0 starts an empty file.
    """

    def __init__(self, output: Path, *, resumed_at: int) -> None:
        self._path = output / "metrics.jsonl"
        self.kept_steps = self._cut(resumed_at)
        """Steps that have a line, after the cut."""
        self._file = self._path.open("ab")
        self._tensorboard_folder = output / "tensorboard"
        self._tensorboard: SummaryWriter | None = None
        self._purge_step = resumed_at + 1

    def _cut(self, resumed_at: int) -> int:
        kept: list[bytes] = []
        steps = 0
        if resumed_at and self._path.exists():
            with named(self._path):
                lines = self._path.read_bytes().split(b"\n")
            for line in lines:
                try:
                    value = parse_json(line)
                    if value["step"] <= resumed_at:
                        kept.append(line + b"\n")
                        steps += value["event"] == "step"
                except (ValueError, KeyError, TypeError):
                    continue
        write_atomic(self._path, b"".join(kept))
        return steps

    def write(self, event: Mapping[str, Any]) -> None:
        """Adds one line (event `step` or `evaluation`, with its `step`)."""
        with named(self._path):
            self._file.write(json.dumps(event, allow_nan=False).encode() + b"\n")
            self._file.flush()
        prefix = "train" if event["event"] == "step" else "held_out"
        for name, value in event.items():
            if isinstance(value, float):
                self._writer().add_scalar(f"{prefix}/{name}", value, event["step"])
            elif isinstance(value, list):
                for number, part in enumerate(value):
                    if isinstance(part, float):
                        tag = f"{prefix}/{name}/{number}"
                        self._writer().add_scalar(tag, part, event["step"])

    def sync(self) -> None:
        """Makes the lines durable; before a checkpoint, so that none of its steps lacks a line."""
        with named(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Syncs and closes both."""
        self.sync()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _writer(self) -> "SummaryWriter":
        if self._tensorboard is None:
            # Its import costs half a second, which a refused run should not pay.
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(self._tensorboard_folder), purge_step=self._purge_step
            )
        return self._tensorboard
