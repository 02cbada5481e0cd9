"""Attention of one TTT step: step-0 keys of earlier rows in the document, and the row's own steps.

Row t at step k sees the step-0 keys of rows <= t of its document (a *block*) and its own keys of
steps 1..k. The block gives an output and a log-sum-exp; the few own scores join in closed form, so
no mask of rows x rows is made. On the CPU one autograd function does both, document by document,
and recomputes the probabilities in backward; elsewhere FlexAttention does the block.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from pipeline.draft.chain import Span, StepPlan


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, own_key: Tensor, own_value: Tensor, plan: StepPlan
) -> Tensor:
    """Output [R, heads, d] of one step's rows.

    query [R, heads, d]; key and value [N, kv_heads, d]: step 0, of the chain plan's keys;
    own_key and own_value [J, R, kv_heads, d]: the rows' steps 1..J, J = 0 at step 0. Queries and
    keys are rotated. Scores are scaled by d ** -0.5.
    """
    if query.device.type == "cpu":
        attended: Tensor = _DocumentAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, own_key, own_value, plan.spans, plan.key_limit
        )
        return attended
    output, lse = flex_block(query, key, value, plan=plan)
    return merge(output, lse, query, own_key=own_key, own_value=own_value)


def merge(
    output: Tensor, lse: Tensor, query: Tensor, *, own_key: Tensor, own_value: Tensor
) -> Tensor:
    """Joins a block's softmax with the row's own scores, in closed form and differentiably.

    output [R, heads, d] and lse [R, heads] (natural log of the block's summed exponentials) of the
    block; own_key, own_value [J, R, kv_heads, d]. Gives [R, heads, d] in the query's dtype.
    """
    if own_key.shape[0] == 0:
        return output
    R, heads, d = query.shape
    kv = own_key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.view(R, kv, heads // kv, d)
    own = torch.einsum("rkgd,jrkd->rkgj", grouped, own_key).reshape(R, heads, -1).to(wide)
    scores = torch.cat([lse.to(wide)[..., None], own * d**-0.5], -1)
    share = scores.softmax(-1).to(query.dtype)  # [R, heads, 1 + J]: the block first
    own_share = share[..., 1:].view(R, kv, heads // kv, -1)
    extra = torch.einsum("rkgj,jrkd->rkgd", own_share, own_value).reshape(R, heads, d)
    return output * share[..., :1] + extra


def flex_block(
    query: Tensor, key: Tensor, value: Tensor, *, plan: StepPlan, compiled: bool = True
) -> tuple[Tensor, Tensor]:
    """Block part by FlexAttention: output [R, heads, d] and lse [R, heads].

    `compiled` false runs the eager form, which materialises rows x keys: for small checks only.
    """
    start, limit = plan.key_start, plan.key_limit

    def visible(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column >= start[row]) & (column < limit[row])

    kernel: Callable[..., Any] = flex_attention
    masker: Callable[..., Any] = create_block_mask
    if compiled:
        kernel, masker = _compiled()
    mask = masker(visible, None, None, query.shape[0], key.shape[0], device=query.device)
    output, aux = kernel(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        block_mask=mask,
        scale=query.shape[-1] ** -0.5,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
        # With few rows FlexAttention would take its decoding kernel, which has no form for these.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return output[0].transpose(0, 1), aux.lse[0].transpose(0, 1)


@functools.cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    # Compiled at first use, not on import; row counts differ from pack to pack, hence dynamic.
    # Whole graphs: past its limit of recompilations torch would go on with rows x keys of scores.
    return (
        torch.compile(flex_attention, dynamic=True, fullgraph=True),
        torch.compile(create_block_mask, dynamic=True, fullgraph=True),
    )


class _DocumentAttention(torch.autograd.Function):
    """`attend` on the CPU. Keeps inputs, output and log-sum-exps; never a score."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        spans: tuple[Span, ...],
        key_limit: Tensor,
    ) -> Tensor:
        work = _Grouped(query, key, value)
        own = _own_scores(work.query, own_key) * work.scale  # [kv, g, R, J]
        output = torch.empty_like(work.query)
        lse = torch.empty(work.query.shape[:3], dtype=work.wide)
        for span in spans:
            scores = work.scores(span, key_limit)  # [kv, g, r, n]
            inside = own[:, :, span.first : span.last]
            n = scores.shape[-1]
            joined = torch.cat([scores, inside], -1) if own.shape[-1] else scores
            # amax + exp + sum by hand: one pass less than logsumexp then exp.
            top = joined.amax(-1, keepdim=True)
            joined = joined.sub_(top).exp_()
            total = joined.sum(-1, keepdim=True)
            lse[:, :, span.first : span.last] = (top + total.log()).squeeze(-1)
            block = joined[..., :n].flatten(1, 2).to(query.dtype)
            mixed = block @ work.value[:, span.key_first : span.key_last]
            output[:, :, span.first : span.last] = mixed.view_as(
                output[:, :, span.first : span.last]
            ) / total.to(query.dtype)
        if own.shape[-1]:
            share = (own - lse[..., None]).exp_().to(query.dtype)
            for j in range(own.shape[-1]):
                output += share[..., j, None] * own_value[j].transpose(0, 1)[:, None]
        ctx.save_for_backward(query, key, value, own_key, own_value, output, lse, key_limit)
        ctx.spans = spans
        return work.ungroup(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, output, lse, limit = ctx.saved_tensors
        work = _Grouped(query, key, value)
        given = work.group(gradients[0])
        delta = (given * output).sum(-1, dtype=work.wide)  # [kv, g, R]
        d_query = torch.empty_like(work.query)
        d_key, d_value = torch.zeros_like(work.key), torch.zeros_like(work.value)
        for span in ctx.spans:
            rows, columns = slice(span.first, span.last), slice(span.key_first, span.key_last)
            shape = work.query[:, :, rows].shape
            part_q = work.query[:, :, rows].reshape(shape[0], -1, shape[3])
            part_g = given[:, :, rows].reshape(shape[0], -1, shape[3])
            share = work.scores(span, limit)
            share = share.sub_(lse[:, :, rows, None]).exp_().flatten(1, 2)
            slope = (part_g @ work.value[:, columns].transpose(1, 2)).to(work.wide)
            slope = slope.sub_(delta[:, :, rows].reshape(shape[0], -1, 1)).mul_(share)
            slope = slope.mul_(work.scale).to(query.dtype)
            d_query[:, :, rows] = (slope @ work.key[:, columns]).view(shape)
            d_key[:, columns] += slope.transpose(1, 2) @ part_q
            d_value[:, columns] += share.to(query.dtype).transpose(1, 2) @ part_g
        d_own_key, d_own_value = torch.empty_like(own_key), torch.empty_like(own_value)
        if own_key.shape[0]:
            own = _own_scores(work.query, own_key) * work.scale
            share = (own - lse[..., None]).exp_()
            slope = (_own_scores(given, own_value) - delta[..., None]) * share * work.scale
            share, slope = share.to(query.dtype), slope.to(query.dtype)
            for j in range(own_key.shape[0]):
                d_query += slope[..., j, None] * own_key[j].transpose(0, 1)[:, None]
                d_own_key[j] = (slope[..., j, None] * work.query).sum(1).transpose(0, 1)
                d_own_value[j] = (share[..., j, None] * given).sum(1).transpose(0, 1)
        return (
            work.ungroup(d_query), d_key.transpose(0, 1), d_value.transpose(0, 1),
            d_own_key, d_own_value, None, None,
        )  # fmt: skip


class _Grouped:
    """Query [kv, g, R, d], key and value [kv, N, d]: heads that share keys lie together."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.kv = key.shape[1]
        self.scale = query.shape[-1] ** -0.5
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.query = self.group(query)
        self.key = key.transpose(0, 1).contiguous()
        self.value = value.transpose(0, 1).contiguous()

    def group(self, x: Tensor) -> Tensor:
        """[R, heads, d] to [kv, g, R, d]."""
        R, heads, d = x.shape
        return x.reshape(R, self.kv, heads // self.kv, d).permute(1, 2, 0, 3).contiguous()

    def ungroup(self, x: Tensor) -> Tensor:
        """Inverse of `group`."""
        return x.permute(2, 0, 1, 3).flatten(1, 2)

    def scores(self, span: Span, limit: Tensor) -> Tensor:
        """Masked, scaled scores [kv, g, r, n] of one block, in the wide dtype, free to change."""
        part = self.query[:, :, span.first : span.last]
        key = self.key[:, span.key_first : span.key_last]
        flat = part.reshape(self.kv, -1, part.shape[-1]) @ key.transpose(1, 2)
        scores = flat.view(*part.shape[:3], -1).to(self.wide).mul_(self.scale)
        column = torch.arange(span.key_first, span.key_last)
        row = limit[span.first : span.last]
        return scores.masked_fill_(column >= row[:, None], -torch.inf)


def _own_scores(query: Tensor, own: Tensor) -> Tensor:
    """[kv, g, R, d] with [J, R, kv, d] to [kv, g, R, J] in the wide dtype, not scaled."""
    wide = torch.promote_types(query.dtype, torch.float32)
    result = torch.empty(*query.shape[:3], own.shape[0], dtype=wide)
    for j in range(own.shape[0]):
        result[..., j] = (query * own[j].transpose(0, 1)[:, None]).sum(-1, dtype=wide)
    return result
