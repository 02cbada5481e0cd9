"""Attention of one TTT step: step-0 keys of earlier rows in the document, and the row's own steps.

Row t at step k sees the step-0 keys of rows <= t of its document (a *block*: a range of the keys)
and its own keys of steps 1..k, which lie in the stack of all steps' own keys. One softmax runs
over both; no mask of rows x keys is made. Backward makes the probabilities again from the
log-sum-exps.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Span:
    """One attention block: query rows [first, last) of a step's rows, all of one document.

    key_first, key_last: their step-0 keys within the plan's keys, up to the last row's own.
    """

    first: int
    last: int
    key_first: int
    key_last: int


def attend(
    query: Tensor,
    keys: Tensor,
    own: Tensor,
    own_at: Tensor,
    start: Tensor,
    limit: Tensor,
    *,
    kv: int,
    spans: tuple[Span, ...],
    out: Tensor,
    lse: Tensor,
) -> None:
    """Writes out [R, heads * d] and lse, the natural log-sum-exps [R, heads] (float32 or wider).

    query [R, heads * d], rotated. keys [N, 2 * kv * d]: keys and values of step 0, a row's keys
    first. own [M1, 2 * kv * d]: the same of all later steps; own_at int64 [k, R]: the rows of `own`
    that a row sees, its own of steps 1..k, k = 0 at step 0. start, limit int64 [R], both rising: a
    row sees keys [start, limit), never none. Scores are scaled by d ** -0.5. spans cover all
    rows; only the CPU form reads them.
    """
    if query.is_cuda:
        from pipeline.kernels.cuda import attention as fused

        fused.attend(query, keys, own, own_at, start, limit, kv=kv, out=out, lse=lse)
        return
    form = _Form(query, keys, kv)
    grouped, mixed, log_sums = form.heads(query), form.heads(out), form.heads(lse)
    key, value = form.halves(keys)
    mine = form.own_scores(query, own, own_at, half=0).mul_(form.scale)  # [kv, R, g, k]
    for span in spans:
        rows, columns = slice(span.first, span.last), slice(span.key_first, span.key_last)
        scores = form.scores(grouped, key, span, limit)  # [kv, r, g, n]
        top = scores.amax(-1, keepdim=True)
        if own_at.shape[0]:
            top = torch.maximum(top, mine[:, rows].amax(-1, keepdim=True))
        # amax, exp and sum by hand: one pass less than logsumexp then exp.
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        total += (mine[:, rows] - top).exp_().sum(-1, keepdim=True)
        log_sums[:, rows] = top + total.log()
        block = scores.flatten(1, 2).to(query.dtype) @ value[:, columns]
        mixed[:, rows] = block.view_as(mixed[:, rows]) / total.to(query.dtype)
    share = mine.sub_(log_sums).exp_().to(query.dtype)
    for j, at in enumerate(own_at):
        mixed += share[..., j, None] * form.halves(own[at])[1][:, :, None]


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    own: Tensor,
    own_at: Tensor,
    start: Tensor,
    limit: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    kv: int,
    spans: tuple[Span, ...],
    delta: Tensor,
    d_query: Tensor,
    d_own: Tensor,
    d_keys: Tensor,
) -> None:
    """Backward of `attend` for one step; gradient [R, heads * d] is that of `out`.

    Writes d_query [R, heads * d] and delta [R, heads] (float32 or wider): sum(gradient * out).
    Adds to d_own [M1, 2 * kv * d] (float32 or wider) at rows own_at. d_keys [N, 2 * kv * d]
    (float32 or wider): the CPU form adds to it; on CUDA it is left to `attend_backward_keys`.
    """
    if query.is_cuda:
        from pipeline.kernels.cuda import attention as fused

        fused.attend_backward(
            gradient, query, keys, own, own_at, start, limit, out, lse,
            kv=kv, delta=delta, d_query=d_query, d_own=d_own,
        )  # fmt: skip
        return
    form = _Form(query, keys, kv)
    grouped, given, slopes = form.heads(query), form.heads(gradient), form.heads(d_query)
    log_sums, inner = form.heads(lse), form.heads(delta)  # [kv, R, g, 1]
    inner.copy_((given.to(form.wide) * form.heads(out)).sum(-1, keepdim=True))
    (key, value), (d_key, d_value) = form.halves(keys), form.halves(d_keys)
    for span in spans:
        rows, columns = slice(span.first, span.last), slice(span.key_first, span.key_last)
        part_query = grouped[:, rows].flatten(1, 2)  # [kv, r * g, d]
        part_given = given[:, rows].flatten(1, 2)
        share = form.scores(grouped, key, span, limit).sub_(log_sums[:, rows]).exp_().flatten(1, 2)
        slope = (part_given @ value[:, columns].transpose(1, 2)).to(form.wide)
        slope = slope.sub_(inner[:, rows].flatten(1, 2)).mul_(share).mul_(form.scale)
        slope = slope.to(query.dtype)
        slopes[:, rows] = (slope @ key[:, columns]).view_as(slopes[:, rows])
        d_key[:, columns] += slope.transpose(1, 2) @ part_query
        d_value[:, columns] += share.to(query.dtype).transpose(1, 2) @ part_given
    share = form.own_scores(query, own, own_at, half=0).mul_(form.scale).sub_(log_sums).exp_()
    slope = form.own_scores(gradient, own, own_at, half=1).sub_(inner).mul_(share)
    share, slope = share.to(query.dtype), slope.mul_(form.scale).to(query.dtype)
    for j, at in enumerate(own_at):
        slopes += slope[..., j, None] * form.halves(own[at])[0][:, :, None]
        pair = torch.stack([
            (slope[..., j, None] * grouped).sum(2), (share[..., j, None] * given).sum(2)
        ])  # fmt: skip
        d_own.index_add_(0, at, pair.permute(2, 0, 1, 3).flatten(1).to(d_own.dtype))


def attend_backward_keys(
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    lse: Tensor,
    delta: Tensor,
    start: Tensor,
    limit: Tensor,
    steps: tuple[tuple[int, int], ...],
    *,
    kv: int,
    d_keys: Tensor,
) -> None:
    """Backward of all steps to the step-0 keys, on CUDA; the CPU form has done it step by step.

    gradient, query, lse, delta, start and limit are stacks [M, ...] of what the steps were given;
    steps: each step's first and last (exclusive) stack position. Writes d_keys [N, 2 * kv * d], any
    float dtype, whatever was in it.
    """
    if query.is_cuda:
        from pipeline.kernels.cuda import attention as fused

        fused.attend_backward_keys(
            gradient, query, keys, lse, delta, start, limit, steps, kv=kv, d_keys=d_keys
        )


class _Form:
    """How heads lie: those that share keys (g of them) together, as [kv, R, g, d]."""

    def __init__(self, query: Tensor, keys: Tensor, kv: int) -> None:
        self.kv = kv
        self.d = keys.shape[1] // (2 * kv)
        self.groups = query.shape[1] // (kv * self.d)
        self.scale = self.d**-0.5
        self.wide = torch.promote_types(query.dtype, torch.float32)

    def heads(self, x: Tensor) -> Tensor:
        """View of [R, heads * w] as [kv, R, g, w]."""
        width = x.shape[1] // (self.kv * self.groups)
        return x.view(x.shape[0], self.kv, self.groups, width).transpose(0, 1)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of [N, 2 * kv * d] as keys and values, each [kv, N, d]."""
        key, value = x.view(x.shape[0], 2, self.kv, self.d).permute(1, 2, 0, 3).unbind(0)
        return key, value

    def scores(self, grouped: Tensor, key: Tensor, span: Span, limit: Tensor) -> Tensor:
        """Masked, scaled scores [kv, r, g, n] of one block, in the wide dtype, free to change."""
        part = grouped[:, span.first : span.last]
        flat = part.flatten(1, 2) @ key[:, span.key_first : span.key_last].transpose(1, 2)
        scores = flat.view(*part.shape[:3], -1).to(self.wide).mul_(self.scale)
        ends = limit[span.first : span.last, None, None]
        border = int(limit[span.first])  # keys before it are seen by every row of the block
        column = torch.arange(border, span.key_last)
        scores[..., border - span.key_first :].masked_fill_(column >= ends, -torch.inf)
        return scores

    def own_scores(self, x: Tensor, own: Tensor, own_at: Tensor, *, half: int) -> Tensor:
        """Rows x [R, heads * d] times own keys (half 0) or values (1): [kv, R, g, k], wide."""
        grouped = self.heads(x)
        result = torch.empty(*grouped.shape[:3], own_at.shape[0], dtype=self.wide)
        for j, at in enumerate(own_at):
            mine = self.halves(own[at])[half][:, :, None]
            result[..., j] = (grouped * mine).sum(-1, dtype=self.wide)
        return result
