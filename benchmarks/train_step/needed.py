"""How many multiply-adds a training step needs, counted from the masks alone.

Counted is what changes the gradient: chain-sparse rows, the embedding half of the attention's input
projected once a token, one teacher product a row. A trainer that does more is not credited for it.
Nothing here reads the trainer's own plan, so a mistake there does not hide itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.train_step.cases import Shape

FORWARD, WITH_WEIGHTS, WITH_BOTH = 1, 2, 3
"""Products a matrix takes part in: forward; and its weight's gradient; and its input's."""
ATTENTION_PRODUCTS = 7
"""Of scores and values: two forward; five backward, the scores once more among them."""


@dataclass(frozen=True)
class Rows:
    """What a pack asks for, in rows.

    keys: rows whose step-0 keys are read. live: live (row, step) pairs; later: those of steps >= 1.
    asked: judged pairs. teachers: rows whose target logits judge. query_tokens, key_tokens: tokens
    whose embedding some query, some key reads. pairs: (live pair, key it sees), own keys included.
    """

    keys: int
    live: int
    later: int
    asked: int
    teachers: int
    query_tokens: int
    key_tokens: int
    pairs: int


def count_rows(supervised: Tensor, document: Tensor, *, steps: int) -> Rows:
    """Counts for masks bool [T] and documents int64 [T], rising from 0."""
    T = len(supervised)
    asked = torch.zeros(steps, T, dtype=torch.bool)
    for k in range(min(steps, T - 2)):
        label = slice(2 + k, T)
        asked[k, : T - 2 - k] = supervised[label] & (document[label] == document[: T - 2 - k])
    live = asked.flip(0).cummax(0).values.flip(0)  # asked at this step or a later one
    rows = torch.arange(T)
    last = torch.full((int(document[-1]) + 1,), -1).scatter_reduce(
        0, document, torch.where(live[0], rows, -1), "amax"
    )
    keys = rows <= last[document]
    position = rows - torch.searchsorted(document, document)

    def read(what: Tensor, ahead: int) -> Tensor:
        there = torch.zeros(T, dtype=torch.bool)
        there[ahead:] = what[: T - ahead]
        return there

    nothing = torch.zeros(T, dtype=torch.bool)
    teachers, queries, key_tokens = nothing, nothing, read(keys, 1)
    for k in range(steps):
        teachers = teachers | read(asked[k], 1 + k)
        queries = queries | read(live[k], 1 + k)
        key_tokens = key_tokens | read(live[k], 1 + k)
    seen = sum(int((position[live[k]] + 1 + k).sum()) for k in range(steps))
    return Rows(
        keys=int(keys.sum()),
        live=int(live.sum()),
        later=int(live[1:].sum()),
        asked=int(asked.sum()),
        teachers=int(teachers.sum()),
        query_tokens=int(queries.sum()),
        key_tokens=int(key_tokens.sum()),
        pairs=seen,
    )


def multiply_adds(rows: Rows, shape: Shape) -> dict[str, int]:
    """Multiply-adds by part; twice their sum is floating-point operations."""
    H, query, key = shape.H, shape.heads * shape.d, 2 * shape.kv * shape.d
    embedding = rows.query_tokens * query + rows.key_tokens * key
    return {
        "fc": WITH_WEIGHTS * rows.keys * 3 * H * H,
        "embedding half": WITH_WEIGHTS * H * embedding,
        "keys and values": WITH_BOTH * (rows.keys + rows.later) * H * key,
        "queries": WITH_BOTH * rows.live * H * query,
        "output": WITH_BOTH * rows.live * query * H,
        "mlp": WITH_BOTH * rows.live * 3 * H * shape.I,
        "head": WITH_BOTH * rows.asked * H * shape.D,
        "teacher": FORWARD * rows.teachers * H * shape.D,
        "attention": ATTENTION_PRODUCTS * rows.pairs * query,
    }
