"""B28: an exported folder holds exactly what SGLang and vLLM load, for one layer."""

import pytest
import torch
from safetensors import safe_open

from pipeline.draft.export import load_exported
from pipeline.slate.files import read_json
from tests.field_reports.drafts_fixtures import copied_run, exported_run  # noqa: F401

# By hand, for a target of width 64, 4 heads of 16, 2 key/value heads, inner width 128, 512 tokens,
# and 64 draft tokens. Both servers read these names: SGLang takes midlayer.* as it is, vLLM renames
# it to layers.0.*; the embedding is absent, so both take the target's.
TENSORS = {
    "d2t": ("I64", [64]),
    "t2d": ("BOOL", [512]),
    "fc.weight": ("BF16", [64, 192]),
    "lm_head.weight": ("BF16", [64, 64]),
    "midlayer.hidden_norm.weight": ("BF16", [64]),
    "midlayer.input_layernorm.weight": ("BF16", [64]),
    "midlayer.mlp.down_proj.weight": ("BF16", [64, 128]),
    "midlayer.mlp.gate_proj.weight": ("BF16", [128, 64]),
    "midlayer.mlp.up_proj.weight": ("BF16", [128, 64]),
    "midlayer.post_attention_layernorm.weight": ("BF16", [64]),
    "midlayer.self_attn.k_proj.weight": ("BF16", [32, 128]),
    "midlayer.self_attn.o_proj.weight": ("BF16", [64, 64]),
    "midlayer.self_attn.q_proj.weight": ("BF16", [64, 128]),
    "midlayer.self_attn.v_proj.weight": ("BF16", [32, 128]),
    "norm.weight": ("BF16", [64]),
}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],  # not the target's LlamaForCausalLM
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "target_hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "draft_vocab_size": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],  # vLLM: the layer that the tap enters
    "eagle_config": {  # SGLang, Llama: the layer that the tap leaves
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
        "use_aux_hidden_state": True,
    },
}


def test_the_file_holds_exactly_these_tensors(exported_run):  # noqa: F811
    with safe_open(exported_run.folder / "export" / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
    assert found == TENSORS


def test_every_value_is_finite_and_no_weight_is_all_zero(exported_run):  # noqa: F811
    for name, tensor in exported_run.exported().items():
        assert torch.isfinite(tensor).all(), name
        assert tensor.any(), name


def test_the_config_names_the_drafters_class_and_sizes(exported_run):  # noqa: F811
    values = read_json(exported_run.folder / "export" / "config.json")
    assert {key: values[key] for key in CONFIG} == CONFIG


def test_the_folder_holds_nothing_else_that_a_server_could_read(exported_run):  # noqa: F811
    names = {path.name for path in (exported_run.folder / "export").iterdir()}
    assert names == {"model.safetensors", "config.json", "manifest.json", ".cleanslate.json"}


def test_a_reload_gives_the_logits_that_the_written_numbers_give(exported_run):  # noqa: F811
    model, vocabulary, _ = load_exported(exported_run.folder / "export")
    tensors = exported_run.exported()
    hidden = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = hidden.double()
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * tensors["norm.weight"].double()
    wanted = x @ tensors["lm_head.weight"].double().T
    with torch.no_grad():
        found = model.logits(hidden).double()
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 0.02  # bfloat16 keeps 8 bits
    assert vocabulary.d2t.tolist() == tensors["d2t"].tolist()


def add_a_layer(tensors):
    for name in list(tensors):
        if name.startswith("midlayer."):
            tensors[name.replace("midlayer", "layers.1")] = tensors[name].clone()


def take_the_name_of_layer_0(tensors):
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer", "layers.0")] = tensors.pop(name)


def bring_an_embedding(tensors):
    tensors["embed_tokens.weight"] = torch.zeros(512, 64)


def spoil(tensors):
    tensors["fc.weight"][3, 4] = float("inf")


def overflow_in_bfloat16(tensors):
    tensors["fc.weight"][3, 4] = 3.4e38  # finite in float32 alone


def cut_a_row(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (add_a_layer, "layers.1.hidden_norm.weight"),
        (take_the_name_of_layer_0, "layers.0.hidden_norm.weight"),
        (bring_an_embedding, "embed_tokens.weight"),
        (spoil, "fc.weight with values that are not finite"),
        (overflow_in_bfloat16, "fc.weight with values that are not finite"),
        (cut_a_row, "lm_head.weight torch.bfloat16 [63, 64]"),
    ],
)
def test_a_checkpoint_that_a_server_would_misread_is_refused_before_the_wipe(
    copied_run,  # noqa: F811
    change,
    named,
):
    copied_run.change_checkpoint(change)
    assert named in copied_run.refused("export")


def test_a_drafter_of_two_layers_cannot_be_asked_for(exported_run):  # noqa: F811
    assert "draft.layers" in exported_run.refused("train", "--set", "draft.layers=2")


def test_a_checkpoint_that_says_two_layers_is_not_exported(copied_run):  # noqa: F811
    copied_run.change_checkpoint(state=lambda said: said["drafter"].update(layers=2))
    assert "with ['layers']" in copied_run.refused("export")
