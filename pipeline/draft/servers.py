"""What SGLang and vLLM read of an EAGLE-3 drafter: tensor tables and layer numbering.

The tables are written by hand from the servers' sources and not from our model, so that a renamed
parameter cannot agree with itself. SGLang skips unknown names in silence (0.5.23
`models/llama_eagle3.py`: `load_weights`), hence the whole key set is compared. vLLM raises on them
(`models/llama_eagle3.py`: `params_dict[name]`).
"""

from collections.abc import Sequence

from pipeline.draft.config import DrafterConfig
from pipeline.draft.errors import ExportError

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""Class both servers map to their Llama EAGLE-3 drafter."""

TensorTable = dict[str, tuple[tuple[str, ...], str]]
"""Name to (symbolic shape, dtype kind); kind float is the drafter's own float dtype."""

# QKV are fused on load from q, k, v; their input is cat(embedding, hidden), hence 2H. `midlayer`
# is renamed to `layers.0`. d2t becomes the hot-token map; t2d is skipped; the embedding is the
# target's.
SGLANG_TENSORS: TensorTable = {
    "d2t": (("D",), "int64"),
    "t2d": (("V",), "bool"),
    "fc.weight": (("H", "3Ht"), "float"),
    "lm_head.weight": (("D", "H"), "float"),
    "midlayer.hidden_norm.weight": (("H",), "float"),
    "midlayer.input_layernorm.weight": (("H",), "float"),
    "midlayer.mlp.down_proj.weight": (("H", "I"), "float"),
    "midlayer.mlp.gate_proj.weight": (("I", "H"), "float"),
    "midlayer.mlp.up_proj.weight": (("I", "H"), "float"),
    "midlayer.post_attention_layernorm.weight": (("H",), "float"),
    "midlayer.self_attn.k_proj.weight": (("KV", "2H"), "float"),
    "midlayer.self_attn.o_proj.weight": (("H", "Q"), "float"),
    "midlayer.self_attn.q_proj.weight": (("Q", "2H"), "float"),
    "midlayer.self_attn.v_proj.weight": (("KV", "2H"), "float"),
    "norm.weight": (("H",), "float"),
}

# vLLM prefixes all but lm_head, d2t and t2d with `model.` and renames `midlayer.` to `layers.0.`;
# d2t loads as draft_id_to_target_id (long); t2d is skipped; the embedding is the target's.
VLLM_TENSORS: TensorTable = {
    "midlayer.self_attn.q_proj.weight": (("Q", "2H"), "float"),
    "midlayer.self_attn.k_proj.weight": (("KV", "2H"), "float"),
    "midlayer.self_attn.v_proj.weight": (("KV", "2H"), "float"),
    "midlayer.self_attn.o_proj.weight": (("H", "Q"), "float"),
    "midlayer.input_layernorm.weight": (("H",), "float"),
    "midlayer.hidden_norm.weight": (("H",), "float"),
    "midlayer.post_attention_layernorm.weight": (("H",), "float"),
    "midlayer.mlp.gate_proj.weight": (("I", "H"), "float"),
    "midlayer.mlp.up_proj.weight": (("I", "H"), "float"),
    "midlayer.mlp.down_proj.weight": (("H", "I"), "float"),
    "fc.weight": (("H", "3Ht"), "float"),
    "norm.weight": (("H",), "float"),
    "lm_head.weight": (("D", "H"), "float"),
    "d2t": (("D",), "int64"),
    "t2d": (("V",), "bool"),
}

TABLES = {"sglang": SGLANG_TENSORS, "vllm": VLLM_TENSORS}

# SGLang 0.5.23, by the target's class: what `set_eagle3_layers_to_capture` does to explicit ids.
# "next": captures the input of layer id + 1. "first": the input of layer id, but of id + 1 when the
# first id is 1 (deepseek_v2.py, which also serves Kimi).
SGLANG_NUMBERING = {
    "LlamaForCausalLM": "next",
    "MistralForCausalLM": "next",
    "Qwen2ForCausalLM": "next",
    "Qwen3ForCausalLM": "next",
    "Qwen2MoeForCausalLM": "next",
    "Qwen3MoeForCausalLM": "next",
    "DeepseekV2ForCausalLM": "first",
    "DeepseekV3ForCausalLM": "first",
    "DeepseekV32ForCausalLM": "first",
    "KimiK25ForConditionalGeneration": "first",
}


def server_layer_ids(server: str, architecture: str, taps: Sequence[int]) -> list[int]:
    """The ids that make `server` capture the residual stream entering layers `taps`.

    server: "sglang" or "vllm"; architecture: the *target's* class in its config.json. vLLM numbers
    as we do for every class. Errors: ExportError, also where no ids give these taps.
    """
    if server == "vllm":
        return list(taps)
    numbering = SGLANG_NUMBERING.get(architecture)
    if numbering is None:
        raise ExportError(
            f"target class {architecture!r}",
            wanted=f"one whose SGLang layer numbering is known: {sorted(SGLANG_NUMBERING)}",
            next_step="read set_eagle3_layers_to_capture of its SGLang model file and add it to "
            "pipeline/draft/servers.py",
        )
    ids = [tap - 1 for tap in taps] if numbering == "next" else list(taps)
    first_refused = 0 if numbering == "next" else 1
    if taps[0] == first_refused:
        raise ExportError(
            f"taps {list(taps)} for target class {architecture}",
            wanted=f"a first tap other than {first_refused}: SGLang has no id for it there",
            next_step="choose another first tap: extract.taps",
        )
    return ids


def table_shapes(table: TensorTable, config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The table's shapes in numbers."""
    sizes = {
        "H": config.hidden_size,
        "2H": 2 * config.hidden_size,
        "3Ht": 3 * config.target_hidden_size,
        "I": config.intermediate_size,
        "Q": config.heads * config.head_dim,
        "KV": config.kv_heads * config.head_dim,
        "D": config.draft_vocabulary_size,
        "V": config.target_vocabulary_size,
    }
    return {name: tuple(sizes[part] for part in shape) for name, (shape, _) in table.items()}
