"""Small chains for the tests of attention: by the room's functions, and by one dense softmax."""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.kernels import attention
from pipeline.kernels.attention import Span


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step gives to attention, the gradient of its output, and the CPU form's spans."""

    query: Tensor
    own_at: Tensor
    start: Tensor
    limit: Tensor
    gradient: Tensor
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class Chain:
    """Steps of some documents, their step-0 keys [N, 2 * kv * d], and the later steps' own."""

    keys: Tensor
    own: Tensor
    steps: tuple[Step, ...]
    kv: int
    heads: int


class Result(NamedTuple):
    """Stacks [M, ...] of all steps, and the gradients of keys and own keys."""

    out: Tensor
    lse: Tensor
    d_query: Tensor
    d_keys: Tensor
    d_own: Tensor


def make_chain(
    documents: list[int],
    live: tuple[float, ...],
    *,
    groups: int = 2,
    kv: int = 2,
    d: int = 8,
    block: int = 3,
    spread: float = 1.0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Chain:
    """A step for each share of rows that live; every document's last row does."""
    generator = torch.Generator(device).manual_seed(0)
    N, lengths = sum(documents), torch.tensor(documents, dtype=torch.int64)
    document = torch.arange(len(documents)).repeat_interleave(lengths)
    starts = torch.searchsorted(document, document)
    chance = torch.rand(N, generator=torch.Generator().manual_seed(1))
    chance[lengths.cumsum(0) - 1] -= 0.999
    rows = [(chance < share).nonzero().flatten() for share in live]

    def noise(*shape: int) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        made = torch.randn(*shape, generator=generator, dtype=wide, device=device)
        return made.mul_(spread).to(dtype)

    first_own = [0, 0, *torch.tensor([r.shape[0] for r in rows[1:]]).cumsum(0).tolist()]
    steps = []
    for k, mine in enumerate(rows):
        at = [first_own[j] + torch.searchsorted(rows[j], mine) for j in range(1, k + 1)]
        start, limit = starts[mine], mine + 1
        own_at = torch.stack(at) if at else torch.empty(0, mine.shape[0], dtype=torch.int64)
        steps.append(
            Step(
                noise(mine.shape[0], groups * kv * d), own_at.to(device), start.to(device),
                limit.to(device), noise(mine.shape[0], groups * kv * d),
                cut(start.tolist(), limit.tolist(), block),
            )
        )  # fmt: skip
    own = noise(sum(r.shape[0] for r in rows[1:]), 2 * kv * d)
    return Chain(noise(N, 2 * kv * d), own, tuple(steps), kv, groups * kv)


def cut(start: list[int], limit: list[int], block: int) -> tuple[Span, ...]:
    """Spans of at most `block` rows with one start each."""
    spans, first = [], 0
    for last in range(1, len(start) + 1):
        if last == len(start) or start[last] != start[first] or last - first == block:
            spans.append(Span(first, last, start[first], limit[last - 1]))
            first = last
    return tuple(spans)


def dense(chain: Chain) -> Result:
    """In float64: one masked softmax a step, and autograd."""
    keys, own = (x.double().requires_grad_() for x in (chain.keys, chain.own))
    kv, heads = chain.kv, chain.heads
    key, value = keys.view(keys.shape[0], 2, kv, -1).repeat_interleave(heads // kv, 2).unbind(1)
    N, d = key.shape[0], key.shape[2]
    queries, outs, sums = [], [], []
    for step in chain.steps:
        R, k = step.query.shape[0], step.own_at.shape[0]
        queries.append(step.query.double().requires_grad_())
        query = queries[-1].view(R, heads, d)
        mine = own[step.own_at].view(k, R, 2, kv, d).repeat_interleave(heads // kv, 3)
        column = torch.arange(N, device=key.device)
        seen = (column >= step.start[:, None]) & (column < step.limit[:, None])
        block = torch.einsum("rhd,nhd->rhn", query, key).masked_fill(~seen[:, None], -torch.inf)
        scores = torch.cat([block, torch.einsum("rhd,jrhd->rhj", query, mine[:, :, 0])], -1)
        scores = scores * d**-0.5
        share = scores.softmax(-1)
        out = torch.einsum("rhn,nhd->rhd", share[..., :N], value)
        out = out + torch.einsum("rhj,jrhd->rhd", share[..., N:], mine[:, :, 1])
        outs.append(out.flatten(1))
        sums.append(scores.logsumexp(-1).detach())
    given = torch.cat([step.gradient for step in chain.steps]).double()
    slopes = torch.autograd.grad(torch.cat(outs), [*queries, keys, own], given)
    return Result(
        torch.cat(outs).detach(), torch.cat(sums), torch.cat(slopes[:-2]), slopes[-2], slopes[-1]
    )


def computed(chain: Chain, form: Any = attention) -> Result:
    """By the functions of `form`. Outputs are slices of stacks whose rows are wider than they."""
    dtype, device = chain.keys.dtype, chain.keys.device
    wide = torch.promote_types(dtype, torch.float32)
    query = torch.cat([step.query for step in chain.steps])
    gradient = torch.cat([step.gradient for step in chain.steps])

    def stack(columns: int, kind: torch.dtype) -> Tensor:
        held = torch.full((query.shape[0], columns + 16), torch.nan, dtype=kind, device=device)
        return held[:, :columns]

    out, d_query = stack(query.shape[1], dtype), stack(query.shape[1], dtype)
    lse, delta = stack(chain.heads, wide), stack(chain.heads, wide)
    # Both forms add to d_own; to d_keys the plain form adds, the other writes it.
    adds = form is attention and device.type == "cpu"
    d_own = torch.ones_like(chain.own, dtype=wide)
    d_keys = torch.full_like(chain.keys, 1.0 if adds else torch.nan, dtype=wide)
    steps, first = [], 0
    for step in chain.steps:
        steps.append((first, first + step.query.shape[0]))
        first = steps[-1][1]
    for (low, high), step in zip(steps, chain.steps, strict=True):
        form.attend(
            query[low:high], chain.keys, chain.own, step.own_at, step.start, step.limit,
            kv=chain.kv, spans=step.spans, out=out[low:high], lse=lse[low:high],
        )  # fmt: skip
    for (low, high), step in reversed([*zip(steps, chain.steps, strict=True)]):
        form.attend_backward(
            gradient[low:high], query[low:high], chain.keys, chain.own, step.own_at, step.start,
            step.limit, out[low:high], lse[low:high], kv=chain.kv, spans=step.spans,
            delta=delta[low:high], d_query=d_query[low:high], d_own=d_own, d_keys=d_keys,
        )  # fmt: skip
    form.attend_backward_keys(
        gradient, query, chain.keys, lse, delta, torch.cat([step.start for step in chain.steps]),
        torch.cat([step.limit for step in chain.steps]), tuple(steps), kv=chain.kv, d_keys=d_keys,
    )  # fmt: skip
    return Result(out, lse, d_query, d_keys - 1 if adds else d_keys, d_own - 1)


def assert_near(found: Result, wanted: Result, *, relative: float) -> None:
    """Each tensor by its norm; NaN is never near."""
    for name, one, other in zip(Result._fields, found, wanted, strict=True):
        error = float((one.double() - other.double()).norm())
        size = float(other.double().norm())
        assert error <= relative * size, f"{name}: off by {error} of {size}"
