"""What a training run is asked for: plain values, checked, that travel as one JSON object."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pipeline.training.errors import RequestError

_PATHS = ("dataset", "draft_vocabulary", "target", "output", "warm_start")
# Where it runs and what is kept of it: these may change between a run and its resumption.
_NOT_MATHEMATICS = (
    *_PATHS,
    "resume",
    "threads",
    "device",
    "checkpoint_every_steps",
    "keep_checkpoints",
)


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """One training run. RequestError, naming the field, when a value is impossible.

    dataset, target, output, warm_start: folders (warm_start: an exported drafter, or None).
    draft_vocabulary: file; None only with warm_start, whose map is then kept.
    drafter: a `DrafterConfig` as its JSON object. steps: TTT steps K. decay: weight of step k is
    decay**k. loss: "kl" or "tv". warmup_share, final_learning_rate_share: shares of all optimizer
    steps and of the learning rate. tokens_per_pack, tokens_per_step: upper bounds in tokens over
    all ranks (a sample longer than a pack gets its own). checkpoint_every_steps: 0 leaves only the
    last. clip_norm: 0 turns clipping off. reduce_dtype: of gradients on their way between ranks; a
    matter of mathematics, though one rank alone never rounds. threads: CPU threads of each rank.
    """

    dataset: Path
    target: Path
    output: Path
    drafter: Mapping[str, Any] = field(hash=False)
    draft_vocabulary: Path | None = None
    warm_start: Path | None = None
    resume: bool = False
    steps: int = 3
    decay: float = 0.8
    loss: Literal["kl", "tv"] = "kl"
    epochs: int = 3
    learning_rate: float = 1e-4
    final_learning_rate_share: float = 0.0
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup_share: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 0.5
    tokens_per_pack: int = 2048
    tokens_per_step: int = 2048
    seed: int = 0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    checkpoint_every_steps: int = 0
    keep_checkpoints: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "tokens_per_pack", "keep_checkpoints", "threads"):
            self._need(name, getattr(self, name) >= 1, "a whole number of at least 1")
        for name in ("seed", "checkpoint_every_steps"):
            self._need(name, getattr(self, name) >= 0, "a whole number of at least 0")
        for name in ("weight_decay", "clip_norm"):
            value = getattr(self, name)
            self._need(name, math.isfinite(value) and value >= 0, "a number of at least 0")
        self._need("decay", 0 < self.decay <= 1, "a number above 0 and at most 1")
        self._need(
            "learning_rate",
            math.isfinite(self.learning_rate) and self.learning_rate > 0,
            "a number above 0",
        )
        share = self.final_learning_rate_share
        self._need("final_learning_rate_share", 0 <= share <= 1, "a share from 0 to 1")
        self._need("warmup_share", 0 <= self.warmup_share < 1, "a share from 0 to below 1")
        self._need(
            "betas",
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "two numbers from 0 to below 1",
        )
        self._need(
            "tokens_per_step",
            self.tokens_per_step >= self.tokens_per_pack,
            f"at least tokens_per_pack ({self.tokens_per_pack})",
        )
        for name, allowed in _CHOICES.items():
            self._need(name, getattr(self, name) in allowed, "one of " + ", ".join(allowed))
        self._need(
            "draft_vocabulary",
            self.draft_vocabulary is not None or self.warm_start is not None,
            "a file, unless warm_start names a drafter whose map is kept",
        )

    def _need(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise RequestError(
                f"train: {name} is {getattr(self, name)!r}",
                wanted=wanted,
                next_step=f"correct {name} in the profile or override",
            )

    @property
    def packs_per_step(self) -> int:
        """Packs of one optimizer step, over all ranks."""
        return self.tokens_per_step // self.tokens_per_pack

    def mathematics(self) -> dict[str, Any]:
        """The values that decide what is learned, as JSON values; the rest is only where and how.

        A resumed run must agree in all of them. Data is compared by digest, so no path is here.
        """
        return {k: v for k, v in self.to_json().items() if k not in _NOT_MATHEMATICS}

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` turns back into an equal request."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in _PATHS:
            values[name] = None if values[name] is None else str(values[name])
        return {**values, "betas": list(self.betas), "drafter": dict(self.drafter)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads a request. RequestError on unknown, missing or impossible fields."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(value.keys() - fields.keys())
        required = ("dataset", "target", "output", "drafter")
        missing = sorted(name for name in required if name not in value)
        if unknown or missing:
            raise RequestError(
                f"train request: unknown fields {unknown}, missing fields {missing}",
                wanted="the fields " + ", ".join(fields),
                next_step="write the request with TrainRequest.to_json",
            )
        values = dict(value)
        for name in _PATHS:
            if values.get(name) is not None:
                values[name] = Path(values[name])
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        try:
            return cls(**values)
        except TypeError as error:
            raise RequestError(
                f"train request: {error}",
                wanted="numbers where numbers belong",
                next_step="write the request with TrainRequest.to_json",
            ) from error


_CHOICES: dict[str, tuple[str, ...]] = {
    "loss": ("kl", "tv"),
    "schedule": ("cosine", "linear"),
    "compute_dtype": ("float32", "bfloat16"),
    "reduce_dtype": ("float32", "bfloat16"),
    "device": ("cpu", "cuda"),
}
