"""The plain-torch kernels that let SGLang run on a CPU: values by hand."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "docker" / "extractor" / "cpu"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("sgl_kernel")


def test_a_kernel_that_is_not_there_says_so_when_it_is_called(kernels: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.fused_experts.*needs a GPU"):
        kernels.fused_experts(1)


def test_nothing_looks_like_an_amx_machine(kernels: ModuleType) -> None:
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


@pytest.mark.parametrize("mode", [0, 1])
def test_a_tree_has_its_links_positions_and_mask(kernels: ModuleType, mode: int) -> None:
    # Root 0 with children 1 and 2 (topk 2); 3 hangs below 2: candidates 0, 1 at depth 1, then
    # 2, 3 below the expanded candidate 0 and 4, 5 below the expanded candidate 1.
    length, nodes = 3, 4
    parents = torch.tensor([[-1, 0, 1]])
    selected = torch.tensor([[0, 1, 4]])
    links = torch.full((3, 1, nodes), -1)
    positions = torch.zeros(nodes, dtype=torch.long)
    width = nodes + (length if mode == 0 else 0)
    mask = torch.ones(nodes * width, dtype=torch.bool)
    kernels.build_tree_kernel_efficient_cpu(
        parents, selected, torch.tensor([length]), mask, positions, *links, 2, 2, nodes, mode
    )
    assert positions.tolist() == [3, 4, 4, 5]
    assert links[1, 0].tolist() == [1, -1, 3, -1]
    assert links[2, 0].tolist() == [-1, 2, -1, -1]
    past = [True] * (width - nodes)
    own = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    wanted = [[*past, *(bool(one) for one in row)] for row in own]
    assert mask.view(nodes, width).tolist() == wanted


def test_the_path_that_the_target_agrees_with_is_accepted(kernels: ModuleType) -> None:
    candidates = torch.tensor([[10, 11, 12, 13]])
    index = torch.tensor([[0, 1, 2, 3]])
    child, sibling = torch.tensor([[1, -1, 3, -1]]), torch.tensor([[-1, 2, -1, -1]])
    choice = torch.tensor([12, 0, 13, 99])  # after the root 12, after 12 13, after 13 99
    predicts = torch.full((4,), -1)
    accepted, count = torch.full((1, 3), -1), torch.zeros(1, dtype=torch.long)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=candidates,
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=choice,
    )
    assert accepted.tolist() == [[0, 2, 3]]
    assert count.tolist() == [2]
    assert predicts.tolist() == [12, -1, 13, 99]


def test_attention_over_the_cache_is_causal_attention(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out = torch.zeros(3, 4, 8)
    slots = torch.tensor([[4, 3, 2, 1, 0]], dtype=torch.int32)  # cache in reverse order
    kernels.extend_attention_cpu(
        query, None, None, out, key.flip(0), value.flip(0), 1.0, 1.0, slots, torch.tensor([0]),
        torch.tensor([5]), torch.tensor([3]), torch.tensor([0]), 3, 0.5, 0.0, False, 0, None, None,
        None, True,
    )  # fmt: skip
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.repeat_interleave(2, 1).transpose(0, 1)[None],
        value.repeat_interleave(2, 1).transpose(0, 1)[None],
        attn_mask=torch.ones(3, 5, dtype=torch.bool).tril(2),
        scale=0.5,
    )[0].transpose(0, 1)
    assert torch.allclose(out, wanted, atol=1e-6)


def test_ids_are_shifted_and_the_new_token_comes_last(kernels: ModuleType) -> None:
    ids = torch.tensor([1, 2, 3, 7, 8])
    kernels.rotate_input_ids_cpu(
        ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[40], [90]])
    )
    assert ids.tolist() == [2, 3, 40, 8, 90]


def test_the_last_accepted_token_and_the_accepted_slots(kernels: ModuleType) -> None:
    bonus = torch.zeros(2, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(torch.tensor([1, 2, 0, 4, 0, 0]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [2, 4]
    slots = torch.zeros(3, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(
        torch.tensor([0, 2, -1, 3]), torch.tensor([50, 51, 52, 53]), slots
    )
    assert slots.tolist() == [50, 52, 53]
