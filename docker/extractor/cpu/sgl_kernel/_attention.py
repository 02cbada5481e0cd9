"""Attention for SGLang's `intel_amx` backend, the one CPU backend that EAGLE drafting accepts.

n new tokens, m cached ones, Hq query heads, Hk key-value heads. Computed in float32.
"""

import torch
from torch import Tensor

from sgl_kernel._cache import slots_of


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, allowed: Tensor | None, cap: float
) -> Tensor:
    """Query [n, Hq, D], key [m, Hk, D], value [m, Hk, Dv], allowed [n, m] bool: [n, Hq, Dv]."""
    groups = query.shape[1] // key.shape[1]
    heads = [one.float().transpose(0, 1) for one in (query, key, value)]  # [heads, tokens, D]
    keys, values = (one.repeat_interleave(groups, dim=0) for one in heads[1:])
    scores = heads[0] @ keys.transpose(1, 2) * scale  # [Hq, n, m]
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ values).transpose(0, 1)


def _refuse_unsupported(
    *, k_scale: float, v_scale: float, cross: bool, window: int, sinks: Tensor | None
) -> None:
    found = {
        "a quantised cache": k_scale != 1.0 or v_scale != 1.0,
        "cross attention": cross,
        "a sliding window": window > 0,
        "attention sinks": sinks is not None,
    }
    for what, is_there in found.items():
        if is_there:
            raise NotImplementedError(f"CPU stand-in of sgl_kernel: attention with {what}")


def decode_attention_cpu(
    query: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token for each request: key and value stored at loc, output [B, Hq, Dv]."""
    del attn_logits, encoder_lens
    _refuse_unsupported(
        k_scale=k_scale,
        v_scale=v_scale,
        cross=is_cross_attn,
        window=sliding_window_size,
        sinks=sinks,
    )
    if key is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        # With latent attention the value is a part of the key, in the same memory.
        if value is not None and v_buffer.data_ptr() != k_buffer.data_ptr():
            v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for number, (row, length) in enumerate(requests):
        slots = slots_of(req_to_token, row, length)
        here = slice(number, number + 1)
        output[here] = _attend(
            query[here],
            k_buffer[slots],
            v_buffer[slots],
            scale=sm_scale,
            allowed=None,
            cap=logit_cap,
        ).to(output.dtype)


def extend_attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Several new tokens for each request, already in the cache; writes output [sum n, Hq, Dv].

    tree_mask: flat [B, n, n] bool, which of the n drafted tokens see which; all see the past.
    """
    del key, value, max_len_extend, encoder_lens
    _refuse_unsupported(
        k_scale=k_scale,
        v_scale=v_scale,
        cross=is_cross_attn,
        window=sliding_window_size,
        sinks=sinks,
    )
    requests = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    )
    for number, (row, length, new, start) in enumerate(requests):
        past = length - new
        allowed = None
        if tree_mask is not None:
            among = tree_mask.view(-1)[number * new * new : (number + 1) * new * new]
            seen = torch.ones(new, past, dtype=torch.bool)
            allowed = torch.cat([seen, among.view(new, new)], dim=1)
        elif is_causal:
            allowed = torch.ones(new, length, dtype=torch.bool).tril(diagonal=past)
        slots = slots_of(req_to_token, row, length)
        here = slice(start, start + new)
        output[here] = _attend(
            query[here],
            k_buffer[slots],
            v_buffer[slots],
            scale=sm_scale,
            allowed=allowed,
            cap=logit_cap,
        ).to(output.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """Slots of every drafted branch, [B * topk, pool]: the request's past, then its own steps."""
    del pool_len
    branches = req_to_token[req_pool_indices].repeat_interleave(topk, dim=0)
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for number, (row, length) in enumerate(requests):
        for branch in range(topk):
            start = length + branch * num_steps
            steps = req_to_token[row, start : start + num_steps]
            branches[number * topk + branch, length : length + len(steps)] = steps
    return branches
