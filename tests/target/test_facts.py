import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.target.errors import FolderError
from pipeline.target.facts import fingerprint, is_tied, read_facts, tokenizer_digest

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}


def write_config(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def test_a_multimodal_target_shows_its_language_models_sizes(tmp_path: Path) -> None:
    config = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "hidden_size": 7,
        "tie_word_embeddings": False,
        "text_config": SIZES | {"rope_theta": 50000.0, "dtype": "bfloat16", "eos_token_id": 9},
    }
    facts = read_facts(write_config(tmp_path, config))
    assert (facts.hidden_size, facts.layers, facts.head_dim, facts.kv_heads) == (48, 3, 12, 2)
    assert (facts.architecture, facts.model_type) == ("KimiK25ForConditionalGeneration", "kimi_k25")
    assert (facts.dtype, facts.eos_token_ids, facts.tied) == ("bfloat16", (9,), False)


@pytest.mark.parametrize(
    ("spelling", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            5e5,
            {"type": "yarn", "factor": 4.0},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}},
            5e5,
            {"rope_type": "yarn", "factor": 4.0},
        ),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({}, 10000.0, None),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_theta": 5e5},
            5e5,
            {
                "rope_type": "one for each kind of layer",
                "full_attention": {"rope_theta": 1e6},
            },
        ),
    ],
)
def test_rotary_settings_are_read_in_every_spelling(
    tmp_path: Path, spelling: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    facts = read_facts(write_config(tmp_path, SIZES | {"model_type": "llama"} | spelling))
    assert (facts.rope_theta, facts.rope_scaling) == (theta, scaling)


def test_the_generation_configs_end_ids_come_first(tmp_path: Path) -> None:
    config = SIZES | {"model_type": "llama", "eos_token_id": 1}
    folder = write_config(tmp_path, config, generation_config={"eos_token_id": [8, 2, 8]})
    assert read_facts(folder).eos_token_ids == (2, 8)


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    config = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    with pytest.raises(FolderError, match="vocab_size"):
        read_facts(write_config(tmp_path, config | {"model_type": "llama"}))


def test_heads_that_do_not_divide_the_width_are_refused_unless_their_width_is_said(
    tmp_path: Path,
) -> None:
    odd = SIZES | {"model_type": "llama", "num_attention_heads": 5, "num_key_value_heads": 5}
    with pytest.raises(FolderError, match="5 heads for a width of 48"):
        read_facts(write_config(tmp_path, odd))
    assert read_facts(write_config(tmp_path, odd | {"head_dim": 16})).head_dim == 16
    latent = odd | {"kv_lora_rank": 8}  # heads of other widths; this is a default for drafters
    assert read_facts(write_config(tmp_path, latent)).head_dim == 9


def test_key_heads_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="4 heads and 3 key/value heads"):
        read_facts(
            write_config(tmp_path, SIZES | {"model_type": "llama", "num_key_value_heads": 3})
        )


@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_broken_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FolderError, match=r"config\.json"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, True),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "gemma2"}, True),
        ({"model_type": "never_heard_of"}, False),
    ],
)
def test_tied_is_what_is_written_first_else_the_class_default(
    config: dict[str, Any], tied: bool
) -> None:
    assert is_tied(config) == tied


def test_a_copy_has_the_same_fingerprint(tiny: Path, copy: Path) -> None:
    assert fingerprint(copy) == fingerprint(tiny)
    assert tokenizer_digest(copy) == tokenizer_digest(tiny)


def test_another_file_beside_the_target_leaves_the_fingerprint(tiny: Path, copy: Path) -> None:
    (copy / "README.md").write_text("hello")
    assert fingerprint(copy) == fingerprint(tiny)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "code/tok.py"]
)
def test_a_change_to_the_tokenizer_changes_both_digests(tiny: Path, copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    before = (copy / name).read_bytes() if (copy / name).exists() else b""
    (copy / name).write_bytes(before + b" ")
    assert tokenizer_digest(copy) != tokenizer_digest(tiny)
    assert fingerprint(copy) != fingerprint(tiny)


def test_a_change_to_the_config_changes_the_fingerprint_alone(tiny: Path, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert fingerprint(copy) != fingerprint(tiny)
    assert tokenizer_digest(copy) == tokenizer_digest(tiny)


@pytest.mark.parametrize("name", ["a.experts.7.up.weight", "router.weight"])
def test_another_value_in_one_tensor_changes_the_fingerprint(copy: Path, name: str) -> None:
    found = set()
    for value in (1.0, 2.0):
        weights = {f"a.experts.{n}.up.weight": torch.ones(3) for n in range(9)}
        weights |= {"router.weight": torch.ones(3), name: torch.full((3,), value)}
        save_file(weights, copy / "model.safetensors")
        found.add(fingerprint(copy))
    assert len(found) == 2


def test_another_dtype_of_the_weights_changes_the_fingerprint(tiny: Path, copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    halved = {name: tensor.half() for name, tensor in weights.items()}
    save_file(halved, copy / "model.safetensors")
    assert fingerprint(copy) != fingerprint(tiny)


def test_a_folder_without_a_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(FolderError, match="no tokenizer file"):
        tokenizer_digest(copy)
