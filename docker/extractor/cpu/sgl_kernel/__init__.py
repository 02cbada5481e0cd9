"""The functions of SGLang's CPU kernels that it cannot do without, in plain torch.

SGLang publishes no CPU build of sgl_kernel, and the published one does not load without a GPU
driver. Written against the callers in SGLang 0.5.23; for correctness, not for speed. Names that are
not here (SGLang imports many) can be imported and say so when they are called. One must stay away:
SGLang takes the presence of `convert_weight_packed` in torch.ops.sgl_kernel as a sign of an AMX
machine; without it every layer takes its plain torch path.
"""

from collections.abc import Callable
from typing import Any

import torch

from sgl_kernel._attention import (
    build_draft_decode_metadata_cpu,
    decode_attention_cpu,
    extend_attention_cpu,
)
from sgl_kernel._cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel._tree import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

__version__ = "0+cleanslate.cpu"

# SGLang's intel_amx backend takes these two from torch.ops while it is made.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_arguments: object, **_named: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name}: the CPU stand-in of Cleanslate (docker/extractor/cpu) has no such "
            "kernel; this model or option needs a GPU"
        )

    return absent
