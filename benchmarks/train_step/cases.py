"""What is measured, the same for every trainer: shapes, documents, masks and random tensors.

This file and the adapters of other trainers run in those trainers' interpreters, so they import
nothing of this project.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """H hidden, I inner, heads of queries, kv of keys, d of a head; V target, D draft tokens."""

    H: int
    I: int  # noqa: E741
    heads: int
    kv: int
    d: int
    V: int
    D: int


SHAPES = {
    "kimi": Shape(H=7168, I=12288, heads=56, kv=8, d=128, V=163840, D=32000),
    "llama-8b": Shape(H=4096, I=14336, heads=32, kv=8, d=128, V=128256, D=32000),
    "tiny": Shape(H=64, I=96, heads=4, kv=2, d=16, V=512, D=256),
}
ROPE_THETA = 50000.0
RMS_EPS = 1e-5
DECAY = 0.8
CLIP_NORM = 0.5
RATE = 1e-4
TAPS = (2, 16, 29)


@dataclass(frozen=True)
class Case:
    """One line of the table.

    tokens: T, a multiple of `document` tokens. supervised: the last share of each document.
    steps: TTT depth. form: how the documents lie: `pack` (one row, borders known to the trainer),
    `batch` (a document a row) or `row` (one row, borders unknown to it).
    """

    shape: str
    tokens: int
    supervised: float
    steps: int
    form: str
    document: int = 1024
    seed: int = 0

    @property
    def sizes(self) -> Shape:
        """The drafter's sizes."""
        return SHAPES[self.shape]

    @property
    def group(self) -> tuple[str, int, str]:
        """Cases of one group differ by mask and depth alone: one process measures them."""
        return self.shape, self.tokens, self.form


def masks(case: Case) -> tuple[Tensor, Tensor]:
    """The supervised tokens bool [T] and their document int64 [T], on the CPU."""
    at = torch.arange(case.tokens)
    first = round(case.document * (1 - case.supervised))
    return at % case.document >= first, at // case.document


def asked_at(case: Case, *, ahead: int) -> Tensor:
    """Bool [T]: the token `ahead` places on in the same document is supervised.

    Row t at step k is asked for token t + 2 + k. A trainer that reads its mask at t + k gets
    ahead = 2, one that reads it at t + 1 + k gets 1: then all of them judge the same pairs.
    """
    supervised, document = masks(case)
    there = torch.zeros_like(supervised)
    same = document[ahead:] == document[:-ahead]
    there[:-ahead] = supervised[ahead:] & same
    return there


@dataclass(frozen=True, eq=False)
class Material:
    """Random tensors of a group, on the device; states bfloat16 on a GPU, float32 on a CPU.

    ids int64 [T]; taps [T, 3H], low to high; final [T, H]; embedding [V, H]; head [V, H], the
    target's; kept int64 [D], rising: the target tokens that have a draft id.
    """

    ids: Tensor
    taps: Tensor
    final: Tensor
    embedding: Tensor
    head: Tensor
    kept: Tensor

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.ids.device

    @property
    def dtype(self) -> torch.dtype:
        """Of states, and of the drafter's weights in a product."""
        return self.taps.dtype

    @property
    def offsets(self) -> Tensor:
        """Int64 [D]: target id less draft id."""
        return self.kept - torch.arange(len(self.kept), device=self.device)

    @property
    def has_draft_id(self) -> Tensor:
        """Bool [V]."""
        there = torch.zeros(len(self.head), dtype=torch.bool, device=self.device)
        there[self.kept] = True
        return there


def make_material(case: Case, device: torch.device) -> Material:
    """The tensors of a case; the same ones for the same seed, device and torch.

    Target logits outside the draft vocabulary are kept small. Otherwise the target's first choice
    would mostly have no draft id, which real data seldom shows, and a trainer that leaves such
    rows out would be timed on a fifth of its work.
    """
    shape, dtype = case.sizes, torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(case.seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        out = torch.empty(size, device=device, dtype=dtype)
        return out.normal_(generator=generator).mul_(scale)

    kept = torch.randperm(shape.V, generator=generator, device=device)[: shape.D].sort().values
    head = normal(shape.V, shape.H, scale=shape.H**-0.5)
    outside = torch.ones(shape.V, 1, device=device, dtype=dtype).mul_(0.01)
    outside[kept] = 1.0
    return Material(
        ids=torch.randint(0, shape.V, (case.tokens,), generator=generator, device=device),
        taps=normal(case.tokens, 3 * shape.H),
        final=normal(case.tokens, shape.H),
        embedding=normal(shape.V, shape.H),
        head=head.mul_(outside),
        kept=kept,
    )


def rows_of(case: Case, tensor: Tensor) -> Tensor:
    """[T, ...] as the case's form lays it: [documents, tokens each, ...] or [1, T, ...]."""
    documents = case.tokens // case.document if case.form == "batch" else 1
    return tensor.view(documents, -1, *tensor.shape[1:])
