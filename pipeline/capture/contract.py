"""What a stage asks of an engine, and what the engine must answer.

An engine gets token ids, never text. For every request it answers once: a receipt, when a staging
file holds all rows, or a refusal with its reason. Answers come in any order; they are matched by id
and content. One example of a receipt for a request of 5 tokens, run in two chunks:

    Receipt(id="s-7", rows=5, spans=((0, 3), (3, 5)), ids_sha256="...", dtype="bfloat16",
            taps=(2, 15, 27), file="000007.safetensors", logprobs=None)

The staging file is a safetensors file with `tap_0..2` and `final` [n, H] bfloat16 and `input_ids`
[n] int32. It appears by rename when whole, and may appear after the receipt.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipeline.store.index import tensor_bytes


@dataclass(frozen=True)
class Request:
    """A sample to run: input_ids int32 [n]; logprobs asks for those of the prompt's own tokens."""

    id: str
    input_ids: Tensor
    logprobs: bool = False


@dataclass(frozen=True)
class Receipt:
    """What the engine did with a request.

    spans: half-open row ranges in the order they ran, which must cover [0, rows) without a gap.
    ids_sha256: digest of the ids that it ran, as `ids_digest` makes it. taps: the layers captured.
    logprobs: log p(x_{t+1} | x_0..x_t) for t in [0, n-1), nats, from the engine's own logits.
    """

    id: str
    rows: int
    spans: tuple[tuple[int, int], ...]
    ids_sha256: str
    dtype: str
    taps: tuple[int, ...]
    file: str
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Refusal:
    """The engine could not run a request; reason is a short stable code, detail a sentence."""

    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class GroupDone:
    """Every request of one submitted group has been answered; number counts groups from 0."""

    number: int


Answer = Receipt | Refusal | GroupDone


class Engine(Protocol):
    """Runs groups of requests. Faults of single requests are refusals, never exceptions."""

    def submit(self, group: Sequence[Request]) -> None:
        """Hands over one group; may be called again before the first is answered."""

    def answers(self) -> Iterator[Answer]:
        """Answers as they come, for as long as groups are submitted. Faults end the stage."""


def ids_digest(input_ids: Tensor) -> str:
    """Hex sha256 of ids [n] as int32, little endian."""
    return hashlib.sha256(tensor_bytes(input_ids.to(torch.int32))).hexdigest()
