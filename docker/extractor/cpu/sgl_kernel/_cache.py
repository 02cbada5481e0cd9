"""Moves in the pool of cached tokens. B requests; a slot is a token's place in the key-value cache.

`req_to_token` [pool, P] int32 holds the slots of each request, position by position.
"""

import ctypes

import torch
from torch import Tensor


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copies slots src_loc [n] to tgt_loc [n] in every buffer; the ranges may overlap.

    data_ptrs [L] addresses of the buffers, strides [L] bytes of one slot in each.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


def _windows(start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    """(start, end, offset in the flat list) of each request's range of positions."""
    windows, offset = [], 0
    for first, stop in zip(start.tolist(), end.tolist(), strict=True):
        windows.append((first, stop, offset))
        offset += stop - first
    return windows


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Writes the flat list of new slots into positions [start, end) of each request."""
    del pool_len
    for row, (first, stop, offset) in zip(
        req_pool_indices.tolist(), _windows(start_offset, end_offset), strict=True
    ):
        slots = out_cache_loc[offset : offset + stop - first]
        req_to_token[row, first:stop] = slots.to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Reads the slots of positions [start, end) of each request into one flat list."""
    del pool_len
    for row, (first, stop, offset) in zip(
        req_pool_indices.tolist(), _windows(start_offset, end_offset), strict=True
    ):
        slots = req_to_token[row, first:stop]
        out_cache_loc[offset : offset + stop - first] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """The same for the topk * num_cols positions that follow each request's seq_lens [B]."""
    ends = seq_lens + topk * num_cols
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len
    )


def slots_of(req_to_token: Tensor, row: int, length: int) -> Tensor:
    """Slots of the first `length` positions of a request, int64."""
    return req_to_token[row, :length].to(torch.int64)
