"""Which rows of a pack each TTT step computes: known from the masks alone.

Row t at step k is *asked* when its label ids[t + 2 + k] is supervised and in t's document. It is
*live* at step k when it is asked at step k or later; the live sets shrink with k. Step-0 keys are
wanted for rows up to the last live one of each document. Everything else is never computed.
"""

import dataclasses

import torch
from torch import Tensor

QUERY_BLOCK = 256
"""Query rows an attention block holds: bounds the scores kept at once, and fits the L2 cache."""


@dataclasses.dataclass(frozen=True)
class Span:
    """One attention block: query rows [first, last) of a step's rows, all of one document.

    key_first, key_last: their step-0 keys within the plan's keys, up to the last row's own.
    """

    first: int
    last: int
    key_first: int
    key_last: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One TTT step, R rows, A of them asked. Index tensors on the plan's device.

    rows int64 [R]: pack rows that are live. kept int64 [R]: where they stand in the step before
    (None: the same rows). asked int64 [A]: which of the R rows have a label (None: all).
    query_token, key_token int64 [R]: where token row + 1 + k stands in the plan's query_tokens and
    key_tokens. key_start, key_limit int64 [R]: the row sees the plan's keys [key_start, key_limit).
    spans: attention blocks covering all R rows.
    """

    rows: Tensor
    kept: Tensor | None
    asked: Tensor | None
    query_token: Tensor
    key_token: Tensor
    key_start: Tensor
    key_limit: Tensor
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """A pack's work, one plan a step; steps after the last live one are absent.

    keys int64 [N]: pack rows whose step-0 keys are wanted. key_token int64 [N]: where token
    row + 1 stands in key_tokens. query_tokens, key_tokens: pack rows of the tokens whose
    embedding is projected to a query, and to key and value: once, for all steps that read it.
    """

    keys: Tensor
    key_token: Tensor
    query_tokens: Tensor
    key_tokens: Tensor
    steps: tuple[StepPlan, ...]


def asked_rows(supervised: Tensor, document: Tensor, *, step: int) -> Tensor:
    """Whether row t's label at this step, ids[t + 2 + step], is supervised and its own: bool [T].

    supervised bool [T], document int64 [T] rising.
    """
    asked = torch.zeros_like(supervised)
    shift = 2 + step
    if shift < supervised.shape[0]:
        asked[:-shift] = supervised[shift:] & (document[shift:] == document[:-shift])
    return asked


def plan_chains(supervised: Tensor, document: Tensor, *, steps: int) -> ChainPlan:
    """The plan of a pack for `steps` TTT steps. Masks may be on any device; so is the plan."""
    device = supervised.device
    supervised, document = supervised.cpu(), document.cpu()
    T = supervised.shape[0]
    asked = torch.stack([asked_rows(supervised, document, step=k) for k in range(steps)])
    live = asked.flip(0).cummax(0).values.flip(0)  # [K, T]
    depth = int(live.any(1).sum())
    rows = [live[k].nonzero().flatten() for k in range(depth)]
    keys, start, limit = _keys(rows[0] if depth else torch.empty(0, dtype=torch.int64), document)
    # Tokens row + 1 + k never leave the pack: the label of a live row lies further on.
    query_tokens = _marked(T, [rows[k] + 1 + k for k in range(depth)])
    key_tokens = _marked(T, [keys + 1, *(rows[k] + 1 + k for k in range(1, depth))])

    plans = []
    for k in range(depth):
        same = k == 0 or rows[k].shape == rows[k - 1].shape
        hit = asked[k][rows[k]]
        first, last = start[rows[k]], limit[rows[k]]
        plans.append(
            StepPlan(
                rows=rows[k].to(device),
                kept=None if same else torch.searchsorted(rows[k - 1], rows[k]).to(device),
                asked=None if bool(hit.all()) else hit.nonzero().flatten().to(device),
                query_token=torch.searchsorted(query_tokens, rows[k] + 1 + k).to(device),
                key_token=torch.searchsorted(key_tokens, rows[k] + 1 + k).to(device),
                key_start=first.to(device),
                key_limit=last.to(device),
                spans=_spans(first, last),
            )
        )
    return ChainPlan(
        keys=keys.to(device),
        key_token=torch.searchsorted(key_tokens, keys + 1).to(device),
        query_tokens=query_tokens.to(device),
        key_tokens=key_tokens.to(device),
        steps=tuple(plans),
    )


def _keys(live: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose step-0 keys are wanted [N], and for each pack row the keys [start, limit) it sees.

    live int64: rows live at step 0. document int64 [T].
    """
    T = document.shape[0]
    _, local = torch.unique_consecutive(document, return_inverse=True)
    last_live = torch.full((T,), -1)
    last_live.scatter_reduce_(0, local[live], live, "amax")
    wanted = torch.arange(T) <= last_live[local]
    before = torch.cat([torch.zeros(1, dtype=torch.int64), wanted.cumsum(0)])  # keys before a row
    document_start = torch.searchsorted(local, local)
    return wanted.nonzero().flatten(), before[document_start], before[1:]


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
