"""The tokenizer inside a GGUF file, written as tokenizer.json and tokenizer_config.json.

Only byte-level BPE (`gpt2`) with a pre-tokenizer that is known here is converted. A guessed
pre-tokenizer gives other ids for the same text, and every state captured with them is foreign to
what a server sees.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.slate.files import write_atomic, write_json
from pipeline.target.errors import GgufError

# tokenizer.ggml.token_type, llama.cpp's llama_token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# tokenizer.ggml.pre -> whether digits are split off one by one before the byte-level step.
# `smollm`: llama.cpp splits at \p{N} first (llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM);
# transformers' GGUF reader leaves that step out, which makes one token of "42" where there are two.
_DIGITS_SPLIT = {"smollm": True, "gpt-2": False}

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class TokenizerReport:
    """What was written: vocabulary size, steps, special ids by config key, template's origin."""

    vocabulary_size: int
    digits_split: bool
    special_ids: dict[str, int]
    template_origin: str


def write_tokenizer(
    gguf_file: Path, fields: Mapping[str, Any], folder: Path, *, max_length: int
) -> TokenizerReport:
    """Writes tokenizer.json and tokenizer_config.json into a folder that exists.

    max_length: the target's position limit, in tokens. GgufError when the tokenizer is of another
    kind, its pre-tokenizer is unknown, or it has neither a template nor ChatML markers.
    """
    tokens: list[str] = _field(gguf_file, fields, "tokens", kind=str)
    kinds: list[int] = _field(gguf_file, fields, "token_type", kind=int)
    merges = [tuple(merge.split(" ")) for merge in _field(gguf_file, fields, "merges", kind=str)]
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or not isinstance(pre, str) or pre not in _DIGITS_SPLIT:
        raise GgufError(
            f"{gguf_file}: tokenizer {model!r} with pre-tokenizer {pre!r}",
            wanted=f"'gpt2' with one of {sorted(_DIGITS_SPLIT)}",
            next_step="use a target that is a Hugging Face folder already",
        )
    if len(set(tokens)) != len(tokens) or len(kinds) != len(tokens):
        raise GgufError(
            f"{gguf_file}: {len(tokens)} tokens, {len(set(tokens))} different, {len(kinds)} kinds",
            wanted="different tokens with one kind each",
            next_step="fetch the file again",
        )
    digits_split = _DIGITS_SPLIT[str(pre)]
    try:
        tokenizer = _byte_level_bpe(tokens, kinds, merges, digits_split=digits_split)
    except Exception as error:  # bare ones are all that tokenizers raises
        raise GgufError(
            f"{gguf_file}: {type(error).__name__}: {error}",
            wanted="tokens and merges of one byte-level BPE",
            next_step="fetch the file again",
        ) from error
    special_ids = _special_ids(gguf_file, fields, vocabulary_size=len(tokens))
    template, origin = _template(gguf_file, fields, tokens)

    write_atomic(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    config: dict[str, Any] = {
        # Reads tokenizer.json as it is. GPT2Tokenizer would build its own pre-tokenizer in
        # transformers 5 and lose the digit step.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    config |= {key.replace("_id", ""): tokens[value] for key, value in special_ids.items()}
    write_json(folder / "tokenizer_config.json", config)
    return TokenizerReport(
        vocabulary_size=len(tokens),
        digits_split=digits_split,
        special_ids={key: value for key, value in special_ids.items() if key != "unk_token_id"},
        template_origin=origin,
    )


def _field(gguf_file: Path, fields: Mapping[str, Any], name: str, *, kind: type) -> Any:
    """One list of the tokenizer's metadata. GgufError when it is absent or of another kind."""
    value = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise GgufError(
            f"{gguf_file}: no list tokenizer.ggml.{name}",
            wanted="tokens, token_type and merges of a byte-level BPE",
            next_step="use a target that is a Hugging Face folder already",
        )
    return value


def _byte_level_bpe(
    tokens: list[str], kinds: list[int], merges: list[Any], *, digits_split: bool
) -> Tokenizer:
    """The tokenizer: optional digit step, GPT-2's byte-level step, BPE; specials never split."""
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([digits, byte_level]) if digits_split else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    pairs = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, k in pairs if k == _USER_DEFINED]
    )
    return tokenizer


def _special_ids(
    gguf_file: Path, fields: Mapping[str, Any], *, vocabulary_size: int
) -> dict[str, int]:
    """Ids of begin, end, padding and unknown, by Hugging Face's key, where the file has them.

    The end id must be there: without it nothing ends a turn. GgufError when it is absent, or an
    id lies outside the vocabulary.
    """
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids: dict[str, int] = {}
    for key, name in names.items():
        value = fields.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(value, int):
            ids[f"{key}_token_id"] = value
    outside = {key: value for key, value in ids.items() if not 0 <= value < vocabulary_size}
    if outside or "eos_token_id" not in ids:
        raise GgufError(
            f"{gguf_file}: special ids {ids}",
            wanted=f"an end id, and all ids below {vocabulary_size}",
            next_step="fetch the file again or use another target",
        )
    return ids


def _template(gguf_file: Path, fields: Mapping[str, Any], tokens: list[str]) -> tuple[str, str]:
    """The chat template and where it comes from: the file itself, else ChatML if it has markers."""
    template = fields.get("tokenizer.chat_template")
    if template:
        return str(template), "gguf"
    if all(marker in tokens for marker in _CHATML_MARKERS):
        return CHATML_TEMPLATE, "chatml"
    raise GgufError(
        f"{gguf_file}: no chat template and no ChatML markers among the tokens",
        wanted="a model that was trained on conversations",
        next_step="use an instruction-tuned target",
    )
