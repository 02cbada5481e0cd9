"""B32: drafter, states and target of one width and one target, or a refusal that names both."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.slate.files import read_json, write_json
from pipeline.target.facts import fingerprint

from .states_fixtures import (
    Job,
    captured,
    copied_job,
    fingerprinted,
    random_target,
    tiny_target,
    toy_checkpoint,
)

__all__ = ["captured", "fingerprinted", "tiny_target"]


@pytest.mark.parametrize("stage", ["extract", "train"])
def test_a_drafter_of_another_width_is_refused_with_both_before_data_is_read(
    captured: Job, stage: str
) -> None:
    error = captured.refused(stage, "draft.hidden_size=48")
    assert "drafter width 48, target width 32" in error
    assert "draft.hidden_size" in error
    assert not captured.begun("train")
    assert (captured.folder / "extract" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "says"),
    [(3, 2, "3 heads and 2 key/value heads"), (0, 3, "4 heads and 3 key/value heads")],
)
def test_key_heads_that_do_not_divide_the_heads_are_refused_with_both_before_data_is_read(
    captured: Job, heads: int, kv_heads: int, says: str
) -> None:
    sets = (f"draft.heads={heads}", f"draft.kv_heads={kv_heads}")
    assert says in captured.refused("extract", *sets)
    assert says in captured.refused("train", *sets)
    assert not captured.begun("train")


def test_an_odd_head_width_is_refused_before_data_is_read(captured: Job) -> None:
    assert "head_dim = 7" in captured.refused("train", "draft.head_dim=7")
    assert not captured.begun("train")


def test_heads_that_do_not_divide_the_width_have_a_width_of_their_own_in_the_export(
    fingerprinted: Job,
) -> None:
    config = read_json(fingerprinted.folder / "export" / "config.json")
    assert (config["hidden_size"], config["target_hidden_size"]) == (32, 32)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (5, 5)
    assert config["head_dim"] == 8  # the target's
    weights = load_file(fingerprinted.folder / "export" / "model.safetensors")
    assert weights["fc.weight"].shape == (32, 96)
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (40, 64)
    assert weights["midlayer.self_attn.o_proj.weight"].shape == (32, 40)


def test_a_target_whose_heads_do_not_divide_its_width_is_refused_with_both(
    tiny_target: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_target / "config.json").read_text())
    del config["head_dim"]
    odd = {**config, "num_attention_heads": 5, "num_key_value_heads": 5}
    job = Job(tmp_path, toy_checkpoint(tmp_path / "t", like=tiny_target, config=odd))
    assert "5 heads for a width of 32" in job.refused("extract")
    assert not job.begun("prepare")


def test_another_target_of_the_same_width_has_another_fingerprint(
    tiny_target: Path, tmp_path: Path
) -> None:
    other = random_target(tmp_path / "other", seed=8)
    assert fingerprint(other) != fingerprint(tiny_target)
    same_header = [
        (folder / "model.safetensors").read_bytes()[:64] for folder in (other, tiny_target)
    ]
    assert same_header[0] == same_header[1]


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.norm.weight", "model.layers.3.self_attn.q_proj.weight"]
)
def test_a_target_that_differs_in_one_weight_has_another_fingerprint(
    tiny_target: Path, tmp_path: Path, name: str
) -> None:
    weights = load_file(tiny_target / "model.safetensors")
    weights[name] = weights[name] * 1.5
    # Both as they are written here: the tiny target's own files differ in more than a weight.
    same = toy_checkpoint(tmp_path / "same", like=tiny_target)
    tuned = toy_checkpoint(tmp_path / "tuned", like=tiny_target, weights=weights)
    assert fingerprint(same) != fingerprint(tuned)


def test_states_of_a_fine_tuned_brother_are_refused_before_training(
    captured: Job, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(captured.target, tmp_path / "target"))
    weights = load_file(folder / "model.safetensors")
    tuned = {name: tensor + torch.ones_like(tensor) / 64 for name, tensor in weights.items()}
    save_file(tuned, folder / "model.safetensors", metadata={"format": "pt"})
    job = copied_job(captured, tmp_path / "job")
    error = job.refused("train", f"target.source.path={folder}")
    assert "target.fingerprint" in error
    assert "wanted" in error
    assert not job.begun("train")


def test_a_data_set_whose_recorded_target_differs_is_refused_with_both_before_training(
    captured: Job, tmp_path: Path
) -> None:
    job = copied_job(captured, tmp_path)
    facts = job.folder / "extract" / "dataset.json"
    write_json(facts, {**read_json(facts), "target_fingerprint": "ab" * 32})
    job.reseal("extract", "dataset.json")
    error = job.refused("train")
    assert "ab" * 32 in error
    assert fingerprint(captured.target) in error
    assert not job.begun("train")


def test_a_data_set_of_another_width_is_refused_with_both_before_training(
    captured: Job, tmp_path: Path
) -> None:
    job = copied_job(captured, tmp_path)
    facts = job.folder / "extract" / "dataset.json"
    write_json(facts, {**read_json(facts), "hidden_size": 48})
    job.reseal("extract", "dataset.json")
    error = job.refused("train")
    assert "of width 48" in error
    assert "of width 32" in error
    assert not job.begun("train")
