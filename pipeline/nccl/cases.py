"""The messages that stages send between GPUs, as cases to measure.

Extraction: tensor parallelism adds up [tokens, H] in bfloat16 twice a layer. One token of a model
with H 7168 is 14 KiB, 32 requests that decode 448 KiB, and a whole chunk of 8192 prefill tokens
112 MiB, which is most of what an extraction sends. Training: what `training.exchange` sends for the
drafter's buckets (Kimi-like: 51 to 229 M weights): gradients added up in float32, or exchanged in
bfloat16 (train.reduce_dtype), and new weights gathered in bfloat16.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Use = Literal["extraction", "training"]
Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
Dtype = Literal["float32", "bfloat16"]

USES: tuple[Use, ...] = ("extraction", "training")
ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
_KIB, _MIB, _MB = 1 << 10, 1 << 20, 10**6
_WARMUPS = 2


@dataclass(frozen=True)
class Case:
    """One kind of message. size_bytes: of the whole flat buffer of each rank.

    weight: its part in a use's score. batch: messages, each with a buffer of its own, that are
    queued back to back and timed together. samples: such batches that are timed, after warm-ups.
    """

    use: Use
    operation: Operation
    dtype: Dtype
    size_bytes: int
    weight: float
    batch: int
    samples: int
    warmups: int = _WARMUPS

    @property
    def name(self) -> str:
        """As rows and tables call it."""
        return f"{self.operation} {self.dtype} {size_text(self.size_bytes)}"

    @property
    def key(self) -> str:
        """Names it among all cases of all uses."""
        return f"{self.use}: {self.name}"

    def elements(self, world: int) -> int:
        """Elements of one buffer: a multiple of the ranks."""
        return max(1, self.size_bytes // ITEM_BYTES[self.dtype] // world) * world

    def bus_bytes(self, world: int) -> float:
        """Bytes that each rank's link carries for one message, whatever the algorithm."""
        share = (world - 1) / world
        return self.size_bytes * (2 * share if self.operation == "all_reduce" else share)

    def to_json(self) -> dict[str, Any]:
        """For the worker's request."""
        return asdict(self)


def _extraction(size_bytes: int, weight: float, *, batch: int = 16, samples: int = 20) -> Case:
    return Case("extraction", "all_reduce", "bfloat16", size_bytes, weight, batch, samples)


def _training(operation: Operation, dtype: Dtype, size_bytes: int, weight: float) -> Case:
    return Case("training", operation, dtype, size_bytes, weight, batch=1, samples=7, warmups=1)


CASES: tuple[Case, ...] = (
    _extraction(4 * _KIB, 1),
    _extraction(16 * _KIB, 3),
    _extraction(64 * _KIB, 2),
    _extraction(256 * _KIB, 2),
    _extraction(1 * _MIB, 2),
    _extraction(4 * _MIB, 3),
    _extraction(112 * _MIB, 3, batch=1, samples=7),
    _training("reduce_scatter", "float32", 200 * _MB, 2),
    _training("reduce_scatter", "float32", 920 * _MB, 2),
    _training("all_to_all", "bfloat16", 100 * _MB, 1),
    _training("all_to_all", "bfloat16", 460 * _MB, 1),
    _training("all_gather", "bfloat16", 100 * _MB, 2),
    _training("all_gather", "bfloat16", 460 * _MB, 2),
)

SIMULATED_CASES: tuple[Case, ...] = (
    Case("extraction", "all_reduce", "bfloat16", 4 * _KIB, 1, batch=4, samples=3),
    Case("extraction", "all_reduce", "bfloat16", 64 * _KIB, 1, batch=2, samples=3),
    Case("training", "reduce_scatter", "float32", 1 * _MB, 1, batch=1, samples=3, warmups=1),
    Case("training", "all_to_all", "bfloat16", 1 * _MB, 1, batch=1, samples=3, warmups=1),
    Case("training", "all_gather", "bfloat16", 1 * _MB, 1, batch=1, samples=3, warmups=1),
)
"""For gloo on a CPU, where only the program is tried."""


def size_text(size_bytes: int) -> str:
    """`4 KiB`, `112 MiB`, `200 MB`."""
    for unit, text in ((_MIB, "MiB"), (_KIB, "KiB"), (_MB, "MB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {text}"
    return f"{size_bytes} B"
