"""B06: embedding and head are found for certain, or the folder is refused before any capture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.store.reader import StateDataset
from pipeline.target.tensors import read_embedding, read_head

from .states_fixtures import EMBEDDING, HEAD, Job, tiny_target, toy_checkpoint

__all__ = ["tiny_target"]

KIMI = "KimiK25ForConditionalGeneration"


@pytest.fixture(scope="module")
def weights(tiny_target: Path) -> dict[str, Tensor]:
    return load_file(tiny_target / "model.safetensors")


@pytest.fixture(scope="module")
def config(tiny_target: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((tiny_target / "config.json").read_text())
    return read


def without(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in names}


def nested(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A multimodal target's configuration, with the language model's in text_config."""
    return {
        "architectures": [KIMI],
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "text_config": {**config, **changes},
    }


def moved(weights: dict[str, Tensor], body: str, head: str) -> dict[str, Tensor]:
    """The same tensors: `model.` becomes `body`, the head gets the name `head`."""
    return {
        head if name == HEAD else name.replace("model.", body, 1): tensor
        for name, tensor in weights.items()
    }


def in_two(weights: dict[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Head and layers in the first shard, the embedding in the second, and their index."""
    shards = {
        "model-00001-of-00002.safetensors": without(weights, EMBEDDING),
        "model-00002-of-00002.safetensors": {EMBEDDING: weights[EMBEDDING]},
    }
    return shards, {name: file for file, inside in shards.items() for name in inside}


def test_each_layout_gives_the_exact_tensors_and_is_captured(
    tiny_target: Path, weights: dict[str, Tensor], config: dict[str, Any], tmp_path: Path
) -> None:
    shards, index = in_two(weights)
    folders = {
        "two shards": toy_checkpoint(tmp_path / "b", like=tiny_target, shards=shards, index=index),
        "language_model.model.": toy_checkpoint(
            tmp_path / "c",
            like=tiny_target,
            weights=moved(weights, "language_model.model.", "language_model.lm_head.weight"),
            config=nested(config),
        ),
        "model.language_model.": toy_checkpoint(
            tmp_path / "d",
            like=tiny_target,
            weights=moved(weights, "model.language_model.", HEAD),
            config=nested(config),
        ),
    }
    for folder in folders.values():
        assert torch.equal(read_embedding(folder), weights[EMBEDDING])
        assert torch.equal(read_head(folder), weights[HEAD])
    (tmp_path / "job").mkdir()
    job = Job(tmp_path / "job", folders["language_model.model."], engine="stand_in", taps=[2, 3, 6])
    assert "6 samples kept, 0 left out" in job.good("extract")


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_target_is_captured_and_its_logits_are_its_embeddings(
    tiny_target: Path,
    weights: dict[str, Tensor],
    config: dict[str, Any],
    tmp_path: Path,
    stored: bool,
) -> None:
    tied = {**weights, HEAD: weights[EMBEDDING].clone()} if stored else without(weights, HEAD)
    folder = toy_checkpoint(
        tmp_path / "t",
        like=tiny_target,
        weights=tied,
        config={**config, "tie_word_embeddings": True},
    )
    assert torch.equal(read_head(folder), weights[EMBEDDING])
    job = Job(tmp_path, folder, engine="stand_in")
    # The log-probabilities of the engine are compared with those of the head that was found.
    assert "log-probabilities of 4 samples agree within 0.0000 nats" in job.good("extract")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_plain_precision_is_captured_by_transformers(
    tiny_target: Path, weights: dict[str, Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    other = {name: tensor.to(dtype) for name, tensor in weights.items()}
    folder = toy_checkpoint(tmp_path / "t", like=tiny_target, weights=other)
    assert torch.equal(read_head(folder), weights[HEAD].to(dtype))
    job = Job(tmp_path, folder)
    assert "6 samples kept, 0 left out" in job.good("extract")
    assert len(StateDataset.open(job.folder / "extract").entries) == 6


def packed(weights: dict[str, Tensor], **head: Tensor) -> dict[str, Tensor]:
    return {**without(weights, HEAD), **{f"lm_head.{name}": part for name, part in head.items()}}


SCALE = torch.ones(320, 1)
HEADS = {
    "int4 packed": {"weight_packed": torch.zeros(320, 4, dtype=torch.int32), "weight_scale": SCALE},
    "GPTQ": {"qweight": torch.zeros(4, 320, dtype=torch.int32), "scales": SCALE},
    "int8": {"weight": torch.zeros(320, 32, dtype=torch.int8), "weight_scale": SCALE},
    "fp8": {"weight": torch.zeros(320, 32).to(torch.float8_e4m3fn), "weight_scale_inv": SCALE},
    "fp8 without a scale": {"weight": torch.zeros(320, 32).to(torch.float8_e4m3fn)},
    "bf16 with a scale": {"weight": torch.ones(320, 32).bfloat16(), "weight_scale": SCALE},
    "bf16 with a bias": {
        "weight": torch.ones(320, 32).bfloat16(),
        "bias": torch.ones(320).bfloat16(),
    },
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_is_not_a_plain_weight_is_refused_by_its_names(
    tiny_target: Path, weights: dict[str, Tensor], tmp_path: Path, kind: str
) -> None:
    folder = toy_checkpoint(
        tmp_path / "t", like=tiny_target, weights=packed(weights, **HEADS[kind])
    )
    job = Job(tmp_path, folder)
    error = job.refused("extract")
    assert "head" in error
    assert all(f"lm_head.{name}" in error for name in HEADS[kind])
    assert "plain weight" in error
    assert not job.begun("extract")


def test_an_absent_embedding_names_what_was_looked_for_and_what_comes_near(
    tiny_target: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    other = {**without(weights, EMBEDDING), "model.tok_embeddings.weight": weights[EMBEDDING]}
    job = Job(tmp_path, toy_checkpoint(tmp_path / "t", like=tiny_target, weights=other))
    error = job.refused("extract")
    assert "no embedding; looked for model.embed_tokens.weight, language_model.model." in error
    assert "near ones: lm_head.weight, model.tok_embeddings.weight" in error
    assert not job.begun("extract")


def test_an_untied_target_without_a_head_is_refused(
    tiny_target: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    folder = toy_checkpoint(tmp_path / "t", like=tiny_target, weights=without(weights, HEAD))
    job = Job(tmp_path, folder)
    assert "no head of an untied target; looked for lm_head.weight" in job.refused("extract")
    assert not job.begun("extract")


def test_a_tied_target_with_another_head_is_refused(
    tiny_target: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    tied = {**config, "tie_word_embeddings": True}
    job = Job(tmp_path, toy_checkpoint(tmp_path / "t", like=tiny_target, config=tied))
    error = job.refused("extract")
    assert "tie_word_embeddings is true, yet lm_head.weight differs" in error
    assert not job.begun("extract")


@pytest.mark.parametrize(
    ("name", "shape"), [(EMBEDDING, (300, 32)), (EMBEDDING, (320, 48)), (HEAD, (321, 32))]
)
@pytest.mark.parametrize("deep", [False, True])
def test_another_size_than_the_configuration_s_is_refused_with_both(
    tiny_target: Path,
    weights: dict[str, Tensor],
    config: dict[str, Any],
    tmp_path: Path,
    name: str,
    shape: tuple[int, int],
    deep: bool,
) -> None:
    other = {**weights, name: torch.ones(shape, dtype=torch.bfloat16)}
    told = nested(config) if deep else config
    if deep:
        other = moved(other, "language_model.model.", "language_model.lm_head.weight")
    folder = toy_checkpoint(tmp_path / "t", like=tiny_target, weights=other, config=told)
    job = Job(tmp_path, folder, taps=[2, 3, 6])
    error = job.refused("extract")
    assert f"has shape {list(shape)}" in error
    where = "text_config of config.json" if deep else "config.json"
    assert f"[vocab_size, hidden_size] = [320, 32] of {where}" in error
    assert not job.begun("extract")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "['model-00002-of-00002.safetensors']"),  # the missing shard
        ({EMBEDDING: "../elsewhere/model.safetensors"}, "['../elsewhere/model.safetensors']"),
        ({EMBEDDING: "/etc/model.safetensors"}, "['/etc/model.safetensors']"),
    ],
)
def test_an_index_that_names_what_is_not_in_the_folder_is_refused(
    tiny_target: Path,
    weights: dict[str, Tensor],
    tmp_path: Path,
    change: dict[str, str],
    says: str,
) -> None:
    shards, index = in_two(weights)
    if not change:
        del shards["model-00002-of-00002.safetensors"]
    folder = toy_checkpoint(
        tmp_path / "t", like=tiny_target, shards=shards, index={**index, **change}
    )
    job = Job(tmp_path, folder)
    assert says in job.refused("extract")
    assert not job.begun("prepare")


def test_a_lone_shard_without_its_index_is_refused(
    tiny_target: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    shards = {"model-00001-of-00002.safetensors": weights}
    job = Job(tmp_path, toy_checkpoint(tmp_path / "t", like=tiny_target, shards=shards))
    error = job.refused("extract")
    assert "no model.safetensors.index.json" in error
    assert "model-00001-of-00002.safetensors" in error
    assert not job.begun("prepare")


def test_a_cut_weight_file_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    folder = toy_checkpoint(tmp_path / "t", like=tiny_target)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    job = Job(tmp_path, folder)
    assert "model.safetensors" in job.refused("extract")
    assert not job.begun("prepare")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "KeyError: 'hidden_size'"),
        ({"num_hidden_layers": "many"}, "invalid literal for int() with base 10: 'many'"),
        (
            {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5},
            "5 heads for a width of 32",
        ),
        ({"num_key_value_heads": 3}, "4 heads and 3 key/value heads"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused_by_its_key(
    tiny_target: Path, config: dict[str, Any], tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    told = {key: value for key, value in {**config, **change}.items() if value is not None}
    job = Job(tmp_path, toy_checkpoint(tmp_path / "t", like=tiny_target, config=told))
    assert says in job.refused("extract")
    assert not job.begun("extract")


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"eos_token_id": "end"}', '{"eos_token_id": 999}']
)
def test_a_broken_generation_config_is_refused(
    tiny_target: Path, tmp_path: Path, content: str
) -> None:
    folder = toy_checkpoint(tmp_path / "t", like=tiny_target)
    (folder / "generation_config.json").write_text(content)
    job = Job(tmp_path, folder)
    job.refused("extract")
    assert not job.begun("prepare")


def yarn(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        ({"rope_parameters": yarn("yarn")}, "'yarn'"),
        ({"rope_scaling": yarn("dynamic"), "rope_parameters": None}, "'dynamic'"),
        ({"rope_parameters": {"full_attention": yarn("default")}}, "'one for each kind of layer'"),
    ],
)
def test_rotary_settings_that_a_drafter_cannot_share_are_refused_before_hours_of_capture(
    tiny_target: Path, config: dict[str, Any], tmp_path: Path, rope: dict[str, Any], kind: str
) -> None:
    told = {key: value for key, value in {**config, **rope}.items() if value is not None}
    job = Job(tmp_path, toy_checkpoint(tmp_path / "t", like=tiny_target, config=told))
    error = job.refused("extract")
    assert f"rope_scaling of type {kind}" in error
    assert "draft.rope_theta" in error
    assert not job.begun("extract")


def test_a_record_with_tokens_beyond_the_embedding_is_left_out_and_counted(
    tiny_target: Path, weights: dict[str, Tensor], config: dict[str, Any], tmp_path: Path
) -> None:
    small = {
        **weights,
        EMBEDDING: weights[EMBEDDING][:270].clone(),
        HEAD: weights[HEAD][:270].clone(),
    }
    folder = toy_checkpoint(
        tmp_path / "t", like=tiny_target, weights=small, config={**config, "vocab_size": 270}
    )
    job = Job(tmp_path, folder)
    error = job.refused("extract")  # all six have such a token
    assert "beyond_embedding" in error
    skipped = (job.folder / "prepare" / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in skipped] == ["beyond_embedding"] * 6
    assert "the target knows 0 to 269" in skipped[0]
