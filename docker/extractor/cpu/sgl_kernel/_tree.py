"""Drafted trees: their shape, their mask, and which path the target agrees with.

B requests, D tree nodes of each. Node 0 is the last token that the target gave; nodes 1 to D - 1
are drafted. The three link tables [B, D] int64 are filled with -1 by the caller.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_FULL_MASK, _TREE_ONLY = 0, 1  # SGLang's TreeMaskMode


def _parents(selected: Sequence[int], origin: Sequence[int], topk: int) -> list[int | None]:
    """Parent node of each of the nodes 1 to D - 1; None when the parent was not selected.

    selected [D - 1]: each node's number among all candidates, topk of them below each expanded one.
    origin: the candidate's number that was expanded at each place; place 0 is the root.
    """
    node_of = {candidate: number for number, candidate in reversed([*enumerate(selected, 1)])}
    return [
        0 if candidate < topk else node_of.get(origin[candidate // topk]) for candidate in selected
    ]


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fills mask, positions [B * D] and the links: first child and next sibling of every node.

    tree_mask is flat: for each request D rows of its length + D columns (or of D columns), the past
    already allowed. A node sees the root, itself and its ancestors.
    """
    if int(tree_mask_mode) not in (_FULL_MASK, _TREE_ONLY):
        raise NotImplementedError("CPU stand-in of sgl_kernel: a bit-packed tree mask")
    nodes, cells, offset = draft_token_num, tree_mask.view(-1), 0
    origins = parent_list.tolist() if parent_list.numel() else [[]] * len(verified_seq_len)
    for number, length in enumerate(verified_seq_len.tolist()):
        parents = [None, *_parents(selected_index[number].tolist(), origins[number], topk)]
        past = length if int(tree_mask_mode) == _FULL_MASK else 0
        own = cells[offset : offset + nodes * (past + nodes)].view(nodes, past + nodes)[:, past:]
        offset += nodes * (past + nodes)
        own[:] = False
        own[:, 0] = True
        here = slice(number * nodes, (number + 1) * nodes)
        retrive_index.view(-1)[here] = torch.arange(number * nodes, (number + 1) * nodes)
        depths = [0] * nodes
        for node in range(1, nodes):
            ancestor: int | None = node
            while ancestor and depths[node] < depth:
                own[node, ancestor] = True
                depths[node] += 1
                ancestor = parents[ancestor]
        positions.view(-1)[here] = torch.tensor(depths) + length
        _link(parents, retrive_next_token[number], retrive_next_sibling[number])


def _link(parents: Sequence[int | None], first_child: Tensor, next_sibling: Tensor) -> None:
    last: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if node == 0 or parent is None:
            continue
        if parent in last:
            next_sibling[last[parent]] = node
        else:
            first_child[parent] = node
        last[parent] = node


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follows each tree as far as its tokens are the target's own next tokens.

    candidates [B, D] token ids; target_predict the target's choice after each node, by flat index.
    Writes accept_index [B, S] (flat indexes of the path, root first), accept_token_num [B] (without
    the root), and predicts at every accepted node, the last one's being the bonus token.
    """
    choice, longest = target_predict.reshape(-1).tolist(), accept_index.shape[1]
    for number in range(len(candidates)):
        flat = retrive_index[number].tolist()
        child, sibling = retrive_next_token[number].tolist(), retrive_next_sibling[number].tolist()
        tokens = candidates[number].tolist()
        path = [0]
        while len(path) < longest:
            node = child[path[-1]]
            while node != -1 and tokens[node] != choice[flat[path[-1]]]:
                node = sibling[node]
            if node == -1:
                break
            path.append(node)
        accept_token_num[number] = len(path) - 1
        for place, node in enumerate(path):
            accept_index[number, place] = flat[node]
            predicts.view(-1)[flat[node]] = choice[flat[node]]


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Last accepted token of each request; accept_tokens has accept_stride places for each."""
    rows = torch.arange(len(bonus_tokens)) * accept_stride
    last = rows + accept_lens[: len(bonus_tokens)].to(torch.int64) - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype))


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Slots of the accepted nodes, in order, without the gaps (-1)."""
    flat = accept_index.reshape(-1)
    kept = out_cache_loc[flat[flat >= 0].to(torch.int64)]
    accept_out_cache_loc[: len(kept)] = kept.to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shifts each request's ids left by one, in place; its new token comes last (or where told)."""
    tokens = topk_index.reshape(-1).tolist()
    requests = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for number, (start, length) in enumerate(requests):
        if length <= 0:
            continue
        end = start + length
        input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
        place = end - 1 if select_index is None else int(select_index[number])
        input_ids[place] = tokens[number]
