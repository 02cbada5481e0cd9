import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.slate.files import sha256_file
from pipeline.target.errors import FolderError
from pipeline.target.facts import read_facts
from pipeline.target.random import make_random_target
from pipeline.target.tokenizer import load_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 64,
    "vocabulary_size": 320,
}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_files_in_another_process(tiny: Path, tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from pipeline.target.random import make_random_target;"
        f"make_random_target(pathlib.Path(sys.argv[1]), seed=7, **{SIZES!r})"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "again")], cwd=root, check=True)
    assert digests(tmp_path / "again") == digests(tiny)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(
    tiny: Path, tmp_path: Path
) -> None:
    make_random_target(tmp_path, seed=8, **SIZES)
    here, there = digests(tmp_path), digests(tiny)
    assert {name for name in here if here[name] != there[name]} == {"model.safetensors"}


def test_its_sizes_are_the_ones_asked_for(tiny: Path) -> None:
    facts = read_facts(tiny)
    assert (facts.hidden_size, facts.layers, facts.heads, facts.kv_heads) == (32, 4, 4, 2)
    assert (facts.vocabulary_size, facts.tied) == (320, False)
    assert len(load_tokenizer(tiny, remote_code=False)) == 320


def test_its_final_norm_is_far_from_one(tiny: Path) -> None:
    norm = load_file(tiny / "model.safetensors")["model.norm.weight"].float()
    assert norm.min() < 0.5
    assert norm.max() > 2


def test_its_end_of_turn_is_the_chatml_marker(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny, remote_code=False)
    assert read_facts(tiny).eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_its_template_marks_turns_and_its_markers_are_single_tokens(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny, remote_code=False)
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Hi 12"},
            {"role": "assistant", "content": "<think>no</think>é"},
        ],
        tokenize=False,
    )
    assert text == (
        "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n<think>no</think>é<|im_end|>\n"
    )
    pieces = tokenizer.tokenize(text)
    assert [pieces.count(marker) for marker in ("<|im_end|>", "<think>", "</think>")] == [2, 1, 1]
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_tokenising_with_special_tokens_adds_the_begin_marker(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny, remote_code=False)
    assert tokenizer.decode(tokenizer("Hi")["input_ids"]) == "<|begin|>Hi"


@pytest.mark.parametrize("size", [261, 5000])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(FolderError, match=str(size)):
        make_random_target(tmp_path / "t", seed=1, **SIZES | {"vocabulary_size": size})
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("wrong", [{"heads": 5}, {"kv_heads": 3}, {"heads": 32, "kv_heads": 32}])
def test_sizes_that_do_not_fit_together_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(FolderError, match="heads"):
        make_random_target(tmp_path / "t", seed=1, **SIZES | wrong)
