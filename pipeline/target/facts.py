"""Facts of a target that other rooms need, and the digests that say which target it is."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from pipeline.slate.files import named, read_json, sha256_file, sha256_json
from pipeline.target.errors import FolderError
from pipeline.target.layout import INDEX_NAME, TensorPlace, read_config, read_layout

# What makes a tokenizer, in all the layouts that transformers reads; *.py is its own code.
_TOKENIZER_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "spiece.model",
    "chat_template*",
    "additional_chat_templates/*",
)
_CODE_PATTERN = "**/*.py"
# Far above every published model: a configuration that says more is no model's, and a class made
# from it would be built for hours.
_MOST = {
    "hidden_size": 1 << 20,
    "layers": 1 << 12,
    "vocabulary_size": 1 << 24,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 22,
    "max_position_embeddings": 1 << 32,
}
_CONFIG_NAMES = ("config.json", "generation_config.json")
_SAMPLED_TENSORS = 4096
_SAMPLED_BYTES = 4096


@dataclass(frozen=True)
class TargetFacts:
    """A target's sizes and conventions, read from its folder.

    rope_scaling: the rotary settings beside the base, None for plain rotation. tied: the head is
    the embedding. eos_token_ids: every id that ends a turn, rising. dtype: config.json's spelling.
    """

    hidden_size: int
    layers: int
    vocabulary_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    architecture: str
    model_type: str
    dtype: str
    tied: bool
    eos_token_ids: tuple[int, ...]


def read_facts(folder: Path) -> TargetFacts:
    """Reads config.json (its text_config for a multimodal target) and generation_config.json.

    FolderError naming the key when one is absent or of another type.
    """
    config = read_config(folder)
    text = text_config(config)
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        theta, scaling = _rotary(text)
        architectures = config.get("architectures") or [""]
        facts = TargetFacts(
            hidden_size=hidden,
            layers=int(text["num_hidden_layers"]),
            vocabulary_size=int(text["vocab_size"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate_size=int(text["intermediate_size"]),
            rms_norm_eps=float(text["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=int(text["max_position_embeddings"]),
            architecture=str(architectures[0]),
            model_type=str(config["model_type"]),
            dtype=_dtype(config, text),
            tied=is_tied(config),
            eos_token_ids=_end_ids(folder, config, text),
        )
        if heads % facts.kv_heads:
            raise ValueError(f"{heads} heads and {facts.kv_heads} key/value heads")
        # Latent attention has heads of other widths; there it is only a default for the drafter.
        if hidden % heads and not text.get("head_dim") and "kv_lora_rank" not in text:
            raise ValueError(f"{heads} heads for a width of {hidden}, and no head_dim")
        for name, most in _MOST.items():
            if not 1 <= getattr(facts, name) <= most:
                raise ValueError(f"{name} is {getattr(facts, name)}")
        return facts
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise FolderError(
            f"{folder / 'config.json'}: {type(error).__name__}: {error}",
            wanted="the sizes of a decoder: hidden_size, num_hidden_layers, vocab_size, ...",
            next_step="check the target's folder in the profile",
        ) from error


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding: as written at the top, else in text_config.

    Written nowhere, the default of transformers' class for the model type counts (a Gemma folder
    says nothing and is tied); for a type that transformers does not know it is False.
    """
    for part in (config, text_config(config)):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    silent = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    return bool(said_or_default(silent, "tie_word_embeddings"))


def said_or_default(config: Mapping[str, Any], key: str) -> Any:
    """What a configuration says of a key, else transformers' default for its model type, else None.

    A default counts as much as a word: a Gemma folder need not say what its class does.
    """
    if key in config:
        return config[key]
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    return getattr(CONFIG_MAPPING[model_type](), key, None)


def _rotary(text: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from transformers 5's `rope_parameters` or the older two keys."""
    parameters = dict(text.get("rope_parameters") or {})
    scaling = dict(text.get("rope_scaling") or {})
    theta = text.get("rope_theta") or parameters.pop("rope_theta", None)
    parameters.pop("rope_theta", None)
    theta = theta or scaling.pop("rope_theta", None) or 10000.0  # transformers' own default
    scaling = scaling or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if any(isinstance(value, Mapping) for value in parameters.values()):
        kind, scaling = "", {"rope_type": "one for each kind of layer", **parameters}
    return float(theta), None if kind == "default" else scaling


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The stored precision as config.json says, in either spelling of the key."""
    for part in (text, config):
        for key in ("dtype", "torch_dtype"):
            if part.get(key):
                return str(part[key]).removeprefix("torch.")
    return "float32"  # transformers' own default


def _end_ids(folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a turn: generation_config.json's, else config.json's. Empty when none is said.

    Generation stops at the former where it is there, so a server does too.
    """
    path = folder / "generation_config.json"
    parts: list[Mapping[str, Any]] = [text, config]
    if path.exists():
        generation = read_json(path)
        if not isinstance(generation, dict):
            raise FolderError(
                f"{path}: a {type(generation).__name__}",
                wanted="a JSON object",
                next_step="fetch the model's folder again, whole",
            )
        parts.insert(0, generation)
    for part in parts:
        value = part.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            return tuple(sorted({int(item) for item in ids}))
    return ()


def fingerprint(folder: Path) -> str:
    """Hex sha256 that names a target: configuration, tokenizer, weight files' headers and samples.

    A weight file counts by name, size and its header's digest (names, types, shapes, places); its
    values by some bytes of each tensor, of some thousand where there are more. That tells a target
    from its fine-tuned brother; reading hundreds of gigabytes for every stage would cost more than
    it proves. FolderError as read_layout and read_config.
    """
    read_config(folder)
    layout = read_layout(folder)
    names = [*_CONFIG_NAMES, INDEX_NAME]
    return sha256_json(
        {
            "configuration": _digests(folder, [folder / name for name in names]),
            "tokenizer": tokenizer_digest(folder),
            "weights": [[f.path.name, f.size_bytes, f.header_sha256] for f in layout.files],
            "samples": _samples_digest(layout.tensors),
        }
    )


def _samples_digest(tensors: Mapping[str, TensorPlace]) -> str:
    """Hex sha256 over bytes from the middle of tensors, in the order of their names.

    Of experts, which are most tensors of a large target and look alike, only some are read.
    """
    names = sorted(tensors, key=lambda name: (".experts." in name, name))
    plain = sum(".experts." not in name for name in names)
    step = max(1, len(names[plain:]) // _SAMPLED_TENSORS)
    by_file: dict[Path, list[str]] = {}
    for name in [*names[:plain], *names[plain::step]]:
        by_file.setdefault(tensors[name].file, []).append(name)
    pieces: dict[str, bytes] = {}
    for path, inside in by_file.items():
        with named(path), path.open("rb") as file:
            for name in inside:
                place = tensors[name]
                file.seek(max(place.start, (place.start + place.end - _SAMPLED_BYTES) // 2))
                pieces[name] = file.read(min(_SAMPLED_BYTES, place.end - place.start))
    digest = hashlib.sha256()
    for name in sorted(pieces):
        digest.update(name.encode() + b"\0" + pieces[name])
    return digest.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """Hex sha256 over all tokenizer files, chat templates and code (*.py) of a folder.

    FolderError when the folder has no tokenizer file.
    """
    files = sorted({path for pattern in _TOKENIZER_PATTERNS for path in folder.glob(pattern)})
    if not any(path.is_file() for path in files):
        raise FolderError(
            f"{folder}: no tokenizer file",
            wanted="tokenizer.json or the files of another kind of tokenizer",
            next_step="check the target's folder in the profile",
        )
    return sha256_json(_digests(folder, [*files, *code_files(folder)]))


def code_files(folder: Path) -> Iterator[Path]:
    """The Python files that a folder brings along, in name order."""
    yield from sorted(folder.glob(_CODE_PATTERN))


def _digests(folder: Path, paths: list[Path]) -> dict[str, str]:
    """Digest by name inside the folder, of those that exist."""
    return {
        path.relative_to(folder).as_posix(): sha256_file(path) for path in paths if path.is_file()
    }
