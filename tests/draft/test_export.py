import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pipeline.draft.errors import ConfigError, DraftError, ExportError
from pipeline.draft.export import export_drafter, load_exported
from pipeline.draft.servers import SGLANG_TENSORS, VLLM_TENSORS, server_layer_ids
from pipeline.target.facts import TargetFacts
from tests.draft.make import make_config, make_drafter, make_rows

TARGET = TargetFacts(
    hidden_size=12, layers=6, vocabulary_size=11, heads=4, kv_heads=2, head_dim=3,
    intermediate_size=20, rms_norm_eps=1e-5, rope_theta=100.0, rope_scaling=None,
    max_position_embeddings=64, architecture="LlamaForCausalLM", model_type="llama",
    dtype="bfloat16", tied=False, eos_token_ids=(2,),
)  # fmt: skip


def export(folder, *, config=None, target=TARGET, taps=(1, 2, 3), change=None, **more):
    config = config or make_config()
    state = make_drafter(config).state_dict()
    if change:
        change(state)
    _, _, _, vocabulary = make_rows(config, [4], [True] * 4)
    return export_drafter(folder, state, vocabulary, config, target=target, taps=taps, **more)


def test_a_reload_gives_the_same_logits(tmp_path):
    config = make_config()
    export(tmp_path)
    model, vocabulary, loaded = load_exported(tmp_path)
    _, _, _, wanted = make_rows(config, [4], [True] * 4)
    assert loaded == config
    assert vocabulary.same_as(wanted)
    hidden = torch.randn(5, 12, generator=torch.Generator().manual_seed(1)).bfloat16()
    source = make_drafter(config).to(torch.bfloat16)
    assert torch.equal(model.logits(hidden), source.logits(hidden))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_file_holds_exactly_the_names_both_servers_read(tmp_path):
    export(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(SGLANG_TENSORS) == set(VLLM_TENSORS)


def test_both_tables_agree_on_every_shape_and_dtype():
    assert SGLANG_TENSORS == VLLM_TENSORS


def test_draft_ids_map_to_the_intended_target_ids(tmp_path):
    export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    targets = tensors["d2t"] + torch.arange(7)
    assert targets.tolist() == tensors["t2d"].nonzero().flatten().tolist()


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0}])
def test_the_config_says_what_the_servers_read(tmp_path, scaling):
    export(tmp_path, config=make_config(rope_scaling=scaling))
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert values["num_hidden_layers"] == 1
    assert values["draft_vocab_size"] == 7
    assert values["vocab_size"] == 11
    assert values["target_hidden_size"] == 12
    assert values["tie_word_embeddings"] is False
    assert values["max_position_embeddings"] == 64
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 100.0
    assert values["rope_scaling"] == scaling


def test_transformers_reads_the_config_with_the_same_rotary_settings(tmp_path):
    export(tmp_path, config=make_config(rope_scaling={"rope_type": "linear", "factor": 2.0}))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == "llama"
    assert theirs.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    assert theirs.head_dim == 4
    assert theirs.draft_vocab_size == 7
    assert theirs.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("architecture", "taps", "ids"),
    [
        ("LlamaForCausalLM", (2, 15, 27), [1, 14, 26]),
        ("Qwen3ForCausalLM", (1, 3, 6), [0, 2, 5]),
        ("DeepseekV3ForCausalLM", (2, 30, 58), [2, 30, 58]),
        ("KimiK25ForConditionalGeneration", (3, 31, 59), [3, 31, 59]),
    ],
)
def test_layer_ids_are_in_the_servers_own_numbering(architecture, taps, ids):
    assert server_layer_ids("sglang", architecture, taps) == ids
    assert server_layer_ids("vllm", architecture, taps) == list(taps)


@pytest.mark.parametrize(
    ("architecture", "taps"),
    [("LlamaForCausalLM", (0, 2, 3)), ("DeepseekV3ForCausalLM", (1, 2, 3)), ("Unheard", (1, 2, 3))],
)
def test_taps_that_sglang_cannot_capture_are_refused(architecture, taps):
    with pytest.raises(ExportError):
        server_layer_ids("sglang", architecture, taps)


@pytest.mark.parametrize(
    ("target", "taps", "match"),
    [
        ({"max_position_embeddings": 8192}, (1, 2, 3), "position limit 64"),
        ({"layers": 3}, (1, 2, 3), "3 layers"),
        ({}, (1, 2, 4), "taps"),
        ({"hidden_size": 24}, (1, 2, 3), "width of 12"),
        ({"vocabulary_size": 12}, (1, 2, 3), "vocabulary of 11"),
    ],
)
def test_a_drafter_that_does_not_fit_the_target_is_refused(tmp_path, target, taps, match):
    with pytest.raises(ExportError, match=match):
        export(tmp_path, target=dataclasses.replace(TARGET, **target), taps=taps)
    assert list(tmp_path.iterdir()) == []


def add_second_layer(state):
    state["layers.1.mlp.up_proj.weight"] = torch.zeros(20, 12)


def drop_a_norm(state):
    del state["midlayer.hidden_norm.weight"]


def rename_the_layer(state):
    state["layer.mlp.up_proj.weight"] = state.pop("midlayer.mlp.up_proj.weight")


def spoil(state):
    state["fc.weight"][0, 0] = float("nan")


def reshape(state):
    state["fc.weight"] = state["fc.weight"].T


@pytest.mark.parametrize(
    "change", [add_second_layer, drop_a_norm, rename_the_layer, spoil, reshape]
)
def test_states_that_a_server_would_misread_are_refused(tmp_path, change):
    with pytest.raises(ExportError):
        export(tmp_path, change=change)
    assert list(tmp_path.iterdir()) == []


def test_the_user_is_told_of_the_training_length(tmp_path):
    report = export(tmp_path, trained_length=48)
    assert any("48" in notice for notice in report.notices)
    assert export(tmp_path, trained_length=64).notices == ()


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("norm.weight"),
        lambda t: t.update(extra=torch.zeros(1)),
        lambda t: t.update({"norm.weight": t["norm.weight"].float()}),
        lambda t: t.update({"norm.weight": t["norm.weight"] * float("inf")}),
        lambda t: t.update(d2t=t["d2t"] + torch.arange(7)),
        lambda t: t.update(d2t=t["d2t"].int()),
    ],
    ids=["missing", "extra", "dtype", "infinite", "absolute ids", "int32"],
)
def test_a_broken_export_is_refused_on_reading(tmp_path, change):
    export(tmp_path)
    rewrite(tmp_path / "model.safetensors", change)
    with pytest.raises(DraftError):
        load_exported(tmp_path)


def test_a_cut_weights_file_is_refused(tmp_path):
    export(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ExportError, match=r"model\.safetensors"):
        load_exported(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 10000.0), ("draft_vocab_size", None), ("num_hidden_layers", 2)],
)
def test_server_keys_edited_by_hand_are_refused_by_name(tmp_path, key, value):
    export(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, key: value}))
    with pytest.raises(ExportError, match=key):
        load_exported(tmp_path)


def test_a_config_of_another_trainer_is_refused(tmp_path):
    export(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((ExportError, ConfigError), match="cleanslate"):
        load_exported(tmp_path)
