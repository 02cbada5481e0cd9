"""A tiny byte-level BPE tokenizer, made in process, and chat templates of every kind we know."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"]
REASONING = ["<think>", "</think>"]
END_IDS = frozenset({SPECIAL.index("<|im_end|>"), SPECIAL.index("<|eot|>")})

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

GENERATION = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation -%}{{- message['content'] + '<|im_end|>' }}{%- endgeneration -%}
{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

LLAMA = """\
{{- '<|begin|>' }}
{%- for message in messages %}
{{- '<|head|>' + message['role'] + '<|/head|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\n\n' }}{%- endif %}"""

# Old answers without their reasoning, the newest with (an empty one if there is none).
STRIPPING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}
{%- set parts = message['content'].split('</think>') %}
{%- if loop.last %}
{{- '<think>' + (parts[0].split('<think>')[-1] if parts | length > 1 else '\n\n') + '</think>' }}
{%- endif %}
{{- parts[-1] | trim }}
{%- else %}{{- message['content'] }}{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Kimi's way: reasoning shown only behind the last answer that calls no tool; a generation prompt
# that opens the reasoning; tools declared in front.
KIMI = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' and not message.get('tool_calls') %}
{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}{{- '<|im_start|>tools\n' + tools | tojson + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + (message.get('name') or message['role']) + '\n' }}
{%- if message['role'] == 'assistant' %}
{{- '<think>' }}
{%- if loop.index0 > ns.last %}{{- message.get('reasoning_content', '') }}{%- endif %}
{{- '</think>' }}
{%- endif %}
{{- message['content'] }}
{%- for call in message.get('tool_calls', []) %}
{{- '[call ' + call['function']['name'] + ' ' }}
{%- set arguments = call['function']['arguments'] %}
{{- arguments if arguments is string else arguments | tojson }}{{- ']' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>' }}{%- endif %}"""

TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")
UPPERCASE = CHATML.replace("message['content']", "message['content'] | upper")

NO_END = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}{{- 'Bot:\n' + message['content'] + '\n' }}
{%- else %}{{- 'You: ' + message['content'] + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Bot:\n' }}{%- endif %}"""

# An old answer loses its end token; only the newest keeps it.
NO_OLD_END = """\
{%- for message in messages %}
{{- message['role'] + ': ' + message['content'] }}
{%- if loop.last or message['role'] != 'assistant' %}{{- '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""

RAISING = """\
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

TEXT = [
    "What is the colour of the sky? It is blue, most of the time.",
    "How many legs has a spider? A spider has eight legs.",
    "user assistant system tool think answer question",
] * 4


def byte_level(template: str) -> PreTrainedTokenizerFast:
    """A fast byte-level BPE tokenizer with the markers above; reasoning markers are not special."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT, trainer)
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in REASONING])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=template,
        eos_token=SPECIAL[1],
        clean_up_tokenization_spaces=False,
    )


class SlowBytes(PreTrainedTokenizer):
    """A slow tokenizer, written in Python as remote code is: one token a byte, no offsets."""

    model_input_names: list[str] = ["input_ids"]  # noqa: RUF012 - the library's way

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        pieces = (bytes([ord(t)]) if len(t) == 1 else t.encode() for t in tokens)
        return b"".join(pieces).decode(errors="replace")


@pytest.fixture(scope="session")
def tokenizer_with() -> Callable[[str], PreTrainedTokenizerFast]:
    """A tokenizer a template, each made once."""
    made: dict[str, PreTrainedTokenizerFast] = {}

    def with_template(template: str) -> PreTrainedTokenizerFast:
        if template not in made:
            made[template] = byte_level(template)
        return made[template]

    return with_template


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Every template by its name in lower case."""
    names = ["CHATML", "GENERATION", "LLAMA", "STRIPPING", "KIMI", "TRIMMING", "UPPERCASE"]
    names += ["NO_END", "NO_OLD_END", "RAISING"]
    return {name.lower(): globals()[name] for name in names}


@pytest.fixture(scope="session")
def end_ids() -> frozenset[int]:
    """The ids of <|im_end|> and <|eot|>."""
    return END_IDS


@pytest.fixture(scope="session")
def slow_tokenizer() -> PreTrainedTokenizer:
    """The slow tokenizer with the ChatML template."""
    return SlowBytes(
        chat_template=CHATML,
        eos_token=SPECIAL[1],
        additional_special_tokens=["<|im_start|>"],
    )
