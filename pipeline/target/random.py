"""A tiny target with random weights: a whole Hugging Face folder in a second, for trying a change.

It speaks no language, yet every part of it behaves like a real target: chat template, end of turn,
reasoning markers, an untied head, and final-norm weights far from 1, so that states taken before
and after the last norm cannot be mistaken for each other (field report B15).
"""

import math
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from pipeline.slate.files import write_atomic, write_json
from pipeline.target.errors import FolderError
from pipeline.target.gguf import WEIGHTS_NAME, tensor_shapes
from pipeline.target.gguf_tokenizer import CHATML_TEMPLATE

_BEGIN, _PAD, _TURN, _END = "<|begin|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (_BEGIN, _PAD, _TURN, _END, "<think>", "</think>")
_BYTES = 256
_POSITIONS = 2048

# What the tokenizer's merges are learnt from.
_TEXT = """\
What is the capital of France? The capital of France is Paris, a city on the river Seine.
How does a steam engine work? Water is heated until it turns into steam, and the steam pushes a
piston. The piston turns a wheel, and the wheel moves the train along its track.
Why is the sky blue? Light from the sun is scattered by the air, and blue light is scattered more
than red light, so we see a blue sky when we look up during the day.
Can you write a short poem about the sea? The waves come in, the waves go out, the gulls above them
wheel and shout; the sand is warm, the wind is free, and all day long I hear the sea.
How many days are there in a year? There are 365 days in a year, and 366 days in a leap year.
What should I cook for dinner tonight? You could cook rice with vegetables. First wash the rice,
then boil it for twelve minutes. Cut onions, carrots and peppers, fry them in oil, and add salt.
Who wrote the play about the prince of Denmark? William Shakespeare wrote Hamlet around 1600.
Please explain what a computer program is. A program is a list of instructions that a computer
follows one after another. Programmers write them in languages such as Python, C or Java.
I feel tired today, what can I do? I am sorry to hear that. Try to drink some water, take a walk in
the fresh air, and go to bed early. If you still feel tired after a week, please ask a doctor.
Which animals live in the desert? Camels, snakes, lizards, scorpions and foxes live in deserts. Many
of them sleep through the hot day and look for food in the cool night.
Do you know a good book about history? There are many good books about history. It depends on which
time and which country you would like to read about. Tell me more and I will help you to choose.
def add(first, second):
    return first + second
for number in range(10):
    print(number, add(number, 1))
Let me think about this question step by step. First we need to know what is given. Then we look for
what is wanted. There is one way from the first to the second, and it goes through the numbers.
"""


def make_random_target(
    folder: Path,
    *,
    seed: int,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate_size: int,
    vocabulary_size: int,
) -> None:
    """Writes a random Llama of the given sizes with a tokenizer of exactly `vocabulary_size`.

    The same arguments give the same files, byte for byte. The end of turn is <|im_end|>; text
    tokenised with special tokens gets <|begin|> in front, which a rendered conversation must not
    have twice. FolderError when the sizes do not fit together, or the vocabulary is smaller than
    bytes and markers or larger than the shipped text can fill.
    """
    if hidden_size % heads or heads % kv_heads or (hidden_size // heads) % 2:
        raise FolderError(
            f"hidden size {hidden_size}, {heads} heads, {kv_heads} key heads",
            wanted="heads that divide the hidden size evenly, an even head size, key heads that "
            "divide the heads",
            next_step="correct the random target's sizes in the profile",
        )
    tokenizer = _tokenizer(vocabulary_size)
    ids = {name: tokenizer.token_to_id(name) for name in _SPECIAL}
    special = {
        "bos_token_id": ids[_BEGIN],
        "eos_token_id": ids[_END],
        "pad_token_id": ids[_PAD],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "vocab_size": vocabulary_size,
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BEGIN,
            "eos_token": _END,
            "pad_token": _PAD,
            "model_max_length": _POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHATML_TEMPLATE,
        },
    )
    write_json(folder / "config.json", config | special)
    write_json(folder / "generation_config.json", special)
    weights = _weights(tensor_shapes(config), layers=layers, seed=seed)
    write_atomic(folder / WEIGHTS_NAME, save(weights, metadata={"format": "pt"}))


def _weights(shapes: dict[str, tuple[int, ...]], *, layers: int, seed: int) -> dict[str, Tensor]:
    """Random bf16 weights by Hugging Face name.

    Matrices keep the size of what passes through them, so that every layer counts in the output;
    the final norm's weights are spread over 0.25..4.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...], deviation: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * deviation).to(torch.bfloat16)

    def spread(shape: tuple[int, ...], factor: float) -> Tensor:
        exponent = torch.rand(shape, generator=generator) * 2 - 1
        return torch.pow(torch.tensor(factor), exponent).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": normal(shapes["embed_tokens"], 1.0)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{stem}.{name}.weight"] = spread(shapes[name], 1.5)
        for room, names in (
            ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
            ("mlp", ("gate_proj", "up_proj", "down_proj")),
        ):
            for name in names:
                deviation = 1 / math.sqrt(shapes[name][1])
                weights[f"{stem}.{room}.{name}.weight"] = normal(shapes[name], deviation)
    weights["model.norm.weight"] = spread(shapes["norm"], 4.0)
    head_deviation = 1 / math.sqrt(shapes["lm_head"][1])
    weights["lm_head.weight"] = normal(shapes["lm_head"], head_deviation)
    return weights


def _tokenizer(vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE learnt from the shipped text, digits one by one. FolderError on the size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=1,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    size = tokenizer.get_vocab_size()
    if size != vocabulary_size:
        raise FolderError(
            f"a vocabulary of {vocabulary_size} tokens for the random target",
            wanted=f"at least {_BYTES + len(_SPECIAL)} tokens, and no more than its text gives "
            f"(it gave {size})",
            next_step="correct target.vocabulary_size in the profile",
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN} $A",
        pair=f"{_BEGIN} $A $B",
        special_tokens=[(_BEGIN, tokenizer.token_to_id(_BEGIN))],
    )
    return tokenizer
