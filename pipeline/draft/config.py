"""What fixes a drafter's shape, checked once at construction."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pipeline.draft.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary scalings that this room, SGLang and vLLM compute alike; yarn is left out because the
servers and transformers disagree on its magnitude factor."""

_ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Sizes and constants of one drafter; all sizes are counts, all taps 0-based layer ids.

    hidden_size: H of the drafter. target_hidden_size: Ht of the target; must equal H, because the
        drafter reads the target's embedding table.
    intermediate_size: inner width of the gated MLP.
    heads, kv_heads, head_dim: query heads, key/value heads (grouped), width of one head.
    draft_vocabulary_size: D. target_vocabulary_size: V; D <= V.
    rope_theta, rope_scaling: rotary base and scaling (None or a dict with `rope_type`).
    rms_norm_eps: of all four norms.
    max_position_embeddings: the position limit written at export.
    norm_output: whether the recurrent state is taken after the final norm (default: before).
    taps: residual stream *entering* these target layers, low to high, distinct.
    Errors: ConfigError.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocabulary_size: int
    target_vocabulary_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rms_norm_eps: float
    max_position_embeddings: int
    norm_output: bool
    taps: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "target_hidden_size",
            "intermediate_size",
            "heads",
            "kv_heads",
            "head_dim",
            "draft_vocabulary_size",
            "target_vocabulary_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _bad(f"{name} = {value!r}", "a whole number of at least 1", name)
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise _bad(f"{name} = {getattr(self, name)!r}", "a number above 0", name)
        if self.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"drafter width {self.hidden_size}, target width {self.target_hidden_size}",
                wanted="equal widths: the drafter reads the target's embedding table",
                next_step=f"set draft.hidden_size to {self.target_hidden_size}, or to 0",
            )
        if self.heads % self.kv_heads:
            raise _bad(
                f"{self.heads} heads and {self.kv_heads} key/value heads",
                "a head count that the key/value head count divides",
                "heads or kv_heads",
            )
        if self.head_dim % 2:
            raise _bad(f"head_dim = {self.head_dim}", "an even number (rotary pairs)", "head_dim")
        if self.draft_vocabulary_size > self.target_vocabulary_size:
            raise _bad(
                f"draft vocabulary {self.draft_vocabulary_size}, "
                f"target vocabulary {self.target_vocabulary_size}",
                "a draft vocabulary no larger than the target's",
                "draft_vocabulary_size",
            )
        self._check_taps()
        self._check_rope()

    @property
    def query_width(self) -> int:
        """Columns of the query projection: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def rope_type(self) -> str:
        """One of ROPE_TYPES."""
        return _rope_type(self.rope_scaling)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, keys as the fields; `from_json` gives the same config back."""
        return {**dataclasses.asdict(self), "taps": list(self.taps)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DrafterConfig":
        """The config that `to_json` wrote. ConfigError on missing or unknown keys."""
        wanted = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, Mapping) or not isinstance(values.get("taps", []), list):
            raise _bad("a drafter config that is none", f"an object with {sorted(wanted)}", "it")
        if set(values) != wanted:
            raise ConfigError(
                f"drafter config without {sorted(wanted - set(values))} "
                f"and with {sorted(set(values) - wanted)}",
                wanted=f"exactly the keys {sorted(wanted)}",
                next_step="use the checkpoint with the version that wrote it",
            )
        return cls(**{**values, "taps": tuple(values["taps"])})

    def _check_taps(self) -> None:
        if any(not isinstance(tap, int) or isinstance(tap, bool) for tap in self.taps):
            raise _bad(f"taps {list(self.taps)}", "three layer ids", "taps")
        rising = all(low < high for low, high in zip(self.taps, self.taps[1:], strict=False))
        if len(self.taps) != 3 or not rising or min(self.taps) < 0:
            raise _bad(
                f"taps {list(self.taps)}", "three distinct layer ids >= 0, low to high", "taps"
            )

    def _check_rope(self) -> None:
        if not isinstance(self.rope_scaling, dict | None):
            raise _bad(f"rope_scaling {self.rope_scaling!r}", "none, or an object", "rope_scaling")
        if self.rope_type not in ROPE_TYPES:
            raise _bad(
                f"rope_scaling of type {self.rope_type!r}",
                f"none, or one of {list(ROPE_TYPES)}",
                "draft.rope_theta: a base of the drafter's own goes without the target's scaling",
            )
        missing = _ROPE_KEYS[self.rope_type] - set(self.rope_scaling or {})
        if missing:
            raise _bad(
                f"rope_scaling {self.rope_scaling} without {sorted(missing)}",
                f"all of {sorted(_ROPE_KEYS[self.rope_type])}",
                "rope_scaling",
            )


def _rope_type(scaling: Mapping[str, Any] | None) -> str:
    if not scaling:
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _bad(found: str, wanted: str, setting: str) -> ConfigError:
    return ConfigError(found, wanted=wanted, next_step=f"correct {setting}")
