"""Which rows of a pack each TTT step computes: known from the masks alone.

Row t at step k is *asked* when its label ids[t + 2 + k] is supervised and in t's document. It is
*live* at step k when it is asked at step k or later; the live sets shrink with k. Step-0 keys are
wanted for rows up to the last live one of each document. Everything else is never computed.

Every live (row, step) pair has one place in the *stack*, step after step, rows rising within one.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.kernels.attention import Span

QUERY_BLOCK = 256
"""Query rows an attention block holds on a CPU: bounds the scores kept at once, fits L2."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ChainPlan:
    """A pack's work. Index tensors int64, on one device; the rest is plain numbers of the host.

    Sizes: T rows of the pack, N keys, K steps, M stack places (`steps`: first and last place of
    each live step), M1 = M - places of step 0, S teachers, A asked pairs.

    keys [N]: pack rows whose step-0 keys are wanted. key_position [N]: position in the document.
    tokens: pack rows of the tokens whose embedding is read. query_at: those of them (by place in
    `tokens`) that are read by a query.
    key_token [N]: place in `tokens` of row + 1. own_token [M1]: that of row + 1 + k, for k >= 1.
    query_token [M]: place in `query_at` of row + 1 + k.
    at_keys: place in `keys` of the rows of step 0. previous [M1]: stack place of the same row one
    step before.
    position [M]: rotary position, of the row plus k.
    start, limit [M]: the row sees the keys [start, limit).
    own_at: `own(k)` gives [k, R]: places, less those of step 0, of the rows' own steps 1..k.
    query_sources [live steps, queries], key_sources [live steps, tokens]: per step, the stack place
    of the query (the place in [M1 | N] of the key) that read this token; -1: none.
    teachers [S]: pack rows whose final state judges. asked [A]: stack places, in order of teacher.
    judge [A]: teacher. label [A]: pack row of the label. asked_step [A].
    judged [S + 1], host: asked pairs before each teacher. counts: asked pairs of each of K steps.
    """

    rows: int
    decay: float
    steps: tuple[tuple[int, int], ...]
    positions: int
    counts: tuple[int, ...]
    judged: NDArray[np.int64]
    keys: Tensor
    key_position: Tensor
    tokens: Tensor
    query_at: Tensor
    key_token: Tensor
    own_token: Tensor
    query_token: Tensor
    at_keys: Tensor
    previous: Tensor
    position: Tensor
    start: Tensor
    limit: Tensor
    own_at: Tensor
    query_sources: Tensor
    key_sources: Tensor
    teachers: Tensor
    asked: Tensor
    judge: Tensor
    label: Tensor
    asked_step: Tensor
    _flat: Tensor | None = dataclasses.field(default=None, repr=False)

    @property
    def weight(self) -> float:
        """Sum of decay**k over the asked pairs: what the loss is divided by."""
        return sum(self.decay**k * count for k, count in enumerate(self.counts))

    @property
    def stack(self) -> int:
        """M, the number of live (row, step) pairs."""
        return self.steps[-1][1] if self.steps else 0

    def own(self, step: int) -> Tensor:
        """[k, R]: places (in the stack from step 1 on) of a step's rows at their steps 1..k."""
        first, last = self.steps[step]
        before = sum(k * (b - a) for k, (a, b) in enumerate(self.steps[:step]))
        size = step * (last - first)
        return self.own_at[before : before + size].view(step, last - first)

    def spans(self, step: int) -> tuple[Span, ...]:
        """Attention blocks of a step: at most QUERY_BLOCK rows of one document. CPU plans only."""
        first, last = self.steps[step]
        return _spans(self.start[first:last], self.limit[first:last])

    def pinned(self) -> "ChainPlan":
        """The same in one block of page-locked memory, from which `to` copies without waiting."""
        flat = torch.cat([tensor.flatten() for tensor in self._tensors().values()])
        return self._over(flat.pin_memory())

    def to(self, device: torch.device) -> "ChainPlan":
        """The same on a device, by one copy."""
        flat = self._flat
        if flat is None:
            flat = torch.cat([tensor.flatten() for tensor in self._tensors().values()])
        return self._over(flat.to(device, non_blocking=True))

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {n: v for n, v in values.items() if isinstance(v, Tensor) and n != "_flat"}

    def _over(self, flat: Tensor) -> "ChainPlan":
        """This plan with all index tensors taken from one flat copy of them."""
        tensors = self._tensors()
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
        views = {
            name: piece.view(tensor.shape)
            for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
        }
        changes: dict[str, Any] = {**views, "_flat": flat}
        return dataclasses.replace(self, **changes)


def asked_rows(supervised: Tensor, document: Tensor, *, step: int) -> Tensor:
    """Whether row t's label at this step, ids[t + 2 + step], is supervised and its own: bool [T].

    supervised bool [T], document int64 [T] rising.
    """
    asked = torch.zeros_like(supervised)
    shift = 2 + step
    if shift < supervised.shape[0]:
        asked[:-shift] = supervised[shift:] & (document[shift:] == document[:-shift])
    return asked


def chain_weight(supervised: Tensor, document: Tensor, *, steps: int, decay: float) -> float:
    """Sum of decay**k over asked (row, step) pairs: what a loss is divided by.

    supervised bool [T], document int64 [T].
    """
    return sum(decay**k * int(asked_rows(supervised, document, step=k).sum()) for k in range(steps))


def plan_chains(supervised: Tensor, document: Tensor, *, steps: int, decay: float) -> ChainPlan:
    """The plan of a pack for `steps` TTT steps, on the CPU.

    supervised bool [T], document int64 [T] rising, both on the CPU. decay: weight of step k is
    decay**k.
    """
    T = supervised.shape[0]
    asked = torch.stack([asked_rows(supervised, document, step=k) for k in range(steps)])
    live = asked.flip(0).cummax(0).values.flip(0)  # [K, T]
    depth = int(live.any(1).sum())
    rows = [live[k].nonzero().flatten() for k in range(depth)]
    sizes = [len(row) for row in rows]
    ends = np.cumsum([0, *sizes]).tolist()
    first = rows[0] if depth else torch.empty(0, dtype=torch.int64)
    R0, M = len(first), ends[-1]

    keys, start, limit, position = _keys(first, document)
    at = torch.stack([_places(T, rows[k], first=ends[k]) for k in range(depth)]) if depth else None
    key_at = _places(T, keys)
    # Tokens row + 1 + k never leave the pack: the label of a live row lies further on.
    query_tokens = _marked(T, [rows[k] + 1 + k for k in range(depth)])
    tokens = _marked(T, [keys + 1, *(rows[k] + 1 + k for k in range(1, depth))])
    token_at, query_place = _places(T, tokens), _places(T, query_tokens)
    own = [at[1 : k + 1, rows[k]] - R0 for k in range(depth)] if at is not None else []

    judges = [rows[k][asked[k][rows[k]]] + 1 + k for k in range(depth)]  # pack rows
    teachers = _marked(T, judges)
    teacher_at = _places(T, teachers)
    judge = _joined([teacher_at[rows_of] for rows_of in judges])
    step_of = _joined([torch.full_like(rows_of, k) for k, rows_of in enumerate(judges)])
    place = _joined([
        at[k, rows_of - 1 - k] for k, rows_of in enumerate(judges) if at is not None
    ])  # fmt: skip
    order = torch.sort(judge, stable=True).indices  # by teacher, then by step

    def sources(of: Tensor, *, less: int) -> Tensor:
        """[depth, len(of)] stack places of the pairs (row, k) that read token row + 1 + k."""
        if at is None:
            return torch.empty(0, len(of), dtype=torch.int64)
        found = []
        for k in range(depth):
            row = of - 1 - k
            there = torch.where(row >= 0, at[k, row.clamp(min=0)], -1)
            found.append(torch.where(there >= 0, there - less, -1))
        return torch.stack(found)

    key_sources = sources(tokens, less=R0)
    if depth:
        # The keys of step 0 lie behind the own keys of later steps, and are more than its queries.
        origin = key_at[(tokens - 1).clamp(min=0)]
        key_sources[0] = torch.where(origin >= 0, origin + M - R0, -1)
    return ChainPlan(
        rows=T,
        decay=decay,
        steps=tuple((ends[k], ends[k + 1]) for k in range(depth)),
        positions=int(position.max()) + 1 + steps if T else 0,
        counts=tuple(int(row.sum()) for row in asked),
        judged=np.searchsorted(judge[order].numpy(), np.arange(len(teachers) + 1)),
        keys=keys,
        key_position=position[keys],
        tokens=tokens,
        query_at=token_at[query_tokens],
        key_token=token_at[keys + 1],
        own_token=_joined([token_at[rows[k] + 1 + k] for k in range(1, depth)]),
        query_token=_joined([query_place[rows[k] + 1 + k] for k in range(depth)]),
        at_keys=key_at[first],
        previous=_joined([at[k - 1, rows[k]] for k in range(1, depth) if at is not None]),
        position=_joined([position[rows[k]] + k for k in range(depth)]),
        start=_joined([start[rows[k]] for k in range(depth)]),
        limit=_joined([limit[rows[k]] for k in range(depth)]),
        own_at=_joined([places.flatten() for places in own]),
        query_sources=sources(query_tokens, less=0),
        key_sources=key_sources,
        teachers=teachers,
        asked=place[order],
        judge=judge[order],
        label=(teachers[judge] + 1)[order],
        asked_step=step_of[order],
    )


def _keys(live: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows whose step-0 keys are wanted [N]; by pack row start, limit and position.

    A row sees the keys [start, limit); position: within its document. live int64: rows live at
    step 0. document int64 [T].
    """
    T = document.shape[0]
    _, local = torch.unique_consecutive(document, return_inverse=True)
    last_live = torch.full((T,), -1)
    last_live.scatter_reduce_(0, local[live], live, "amax")
    wanted = torch.arange(T) <= last_live[local]
    before = torch.cat([torch.zeros(1, dtype=torch.int64), wanted.cumsum(0)])  # keys before a row
    document_start = torch.searchsorted(local, local)
    position = torch.arange(T) - document_start
    return wanted.nonzero().flatten(), before[document_start], before[1:], position


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _places(T: int, rows: Tensor, *, first: int = 0) -> Tensor:
    """[T]: place of each pack row in `rows`, counted from `first`; -1 where it is not in it."""
    places = torch.full((T,), -1)
    places[rows] = torch.arange(first, first + len(rows))
    return places


def _marked(T: int, indices: list[Tensor]) -> Tensor:
    """The distinct values in `indices`, rising; all in [0, T)."""
    mark = torch.zeros(T, dtype=torch.bool)
    for index in indices:
        mark[index] = True
    return mark.nonzero().flatten()


def _spans(start: Tensor, limit: Tensor) -> tuple[Span, ...]:
    """Blocks of at most QUERY_BLOCK rows with one key start each (that is, of one document)."""
    spans: list[Span] = []
    key_starts, counts = torch.unique_consecutive(start, return_counts=True)
    first = 0
    for key_first, count in zip(key_starts.tolist(), counts.tolist(), strict=True):
        end = first + count
        for low in range(first, end, QUERY_BLOCK):
            high = min(low + QUERY_BLOCK, end)
            spans.append(Span(low, high, key_first, int(limit[high - 1])))
        first = end
    return tuple(spans)
