"""The drafter as a folder that SGLang and vLLM load, and its reading back.

Two files: model.safetensors (bf16, with d2t and t2d) and config.json. A wrong name or key is
served in silence, so everything is compared with the tables of `servers.py`, on the way out and on
the way back.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from pipeline.draft.config import DrafterConfig
from pipeline.draft.errors import ExportError
from pipeline.draft.model import Drafter
from pipeline.draft.servers import ARCHITECTURE, TABLES, server_layer_ids, table_shapes
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.slate.files import read_json, read_through, write_atomic, write_json
from pipeline.target.facts import TargetFacts

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
EXPORT_DTYPE = torch.bfloat16
_OWN_KEY = "cleanslate"
_OWN_KEYS = {"drafter", "target_architecture", "origin"}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Which target a drafter was trained for.

    target: its fingerprint. tokens: digest of what each of its token ids means; a draft vocabulary
    is only worth something among the same tokens.
    """

    target: str
    tokens: str


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What was written. tensors: how many; notices: sentences for the user; layer_ids by server."""

    folder: Path
    tensors: int
    parameters: int
    layer_ids: dict[str, list[int]]
    notices: tuple[str, ...]


def export_drafter(
    folder: Path,
    model_state: Mapping[str, Tensor],
    vocabulary: DraftVocabulary,
    config: DrafterConfig,
    *,
    target: TargetFacts,
    taps: Sequence[int],
    trained_length: int | None = None,
    origin: Origin | None = None,
) -> ExportReport:
    """Writes the drafter into an existing folder; weights first, config last, both whole or absent.

    model_state, vocabulary, config, target, taps: as `export_tensors` takes them. trained_length:
    longest sample that was trained on, in tokens, told to the user when the position limit is
    higher. origin: kept for a warm start. Errors: ExportError.
    """
    tensors = export_tensors(model_state, vocabulary, config, target=target, taps=taps)
    values = server_config(config, architecture=target.architecture, origin=origin)
    write_atomic(folder / WEIGHTS_NAME, save(tensors, metadata={"format": "pt"}))
    write_json(folder / CONFIG_NAME, values)
    notices = []
    limit = config.max_position_embeddings
    if trained_length is not None and trained_length < limit:
        notices.append(
            f"the drafter was trained on samples of up to {trained_length} tokens; its position "
            f"limit is {limit} (the target's is {target.max_position_embeddings}), and acceptance "
            f"beyond {trained_length} is unproven"
        )
    if config.norm_output:
        notices.append("norm_output is on: SGLang feeds the normed state back, vLLM does not")
    return ExportReport(
        folder=folder,
        tensors=len(tensors),
        parameters=sum(t.numel() for name, t in tensors.items() if name in model_state),
        layer_ids={s: server_layer_ids(s, target.architecture, config.taps) for s in TABLES},
        notices=tuple(notices),
    )


def export_tensors(
    model_state: Mapping[str, Tensor],
    vocabulary: DraftVocabulary,
    config: DrafterConfig,
    *,
    target: TargetFacts,
    taps: Sequence[int],
) -> dict[str, Tensor]:
    """All tensors of an export on the CPU, bf16 and the two maps, proven fit for both servers.

    model_state: `Drafter.state_dict()` or the masters under the same names, any float dtype.
    taps: as the shards recorded them, must be the config's. Errors: ExportError.
    """
    check_target(config, target, taps)
    tensors = {
        name: tensor.detach().to("cpu", EXPORT_DTYPE).contiguous()
        for name, tensor in model_state.items()
    }
    tensors |= vocabulary.tensors()
    check_tensors(tensors, config)
    return tensors


def read_origin(folder: Path) -> Origin | None:
    """What an export says of the target it was trained for; None when it was not told."""
    origin = _own_block(folder, read_json(folder / CONFIG_NAME))["origin"]
    return None if origin is None else Origin(**origin)


def load_exported(folder: Path) -> tuple[Drafter, DraftVocabulary, DrafterConfig]:
    """The drafter (bf16 on the CPU, eval mode), its vocabulary and config, all checked.

    ExportError on missing or extra names, wrong shapes or dtypes, values that are not finite,
    and server keys that do not say what the drafter's own config says.
    """
    values = read_json(folder / CONFIG_NAME)
    own = _own_block(folder, values)
    config = DrafterConfig.from_json(own["drafter"])
    origin = None if own["origin"] is None else Origin(**own["origin"])
    wanted = server_config(config, architecture=str(own["target_architecture"]), origin=origin)
    differing = sorted(key for key in wanted | values if wanted.get(key) != values.get(key))
    if differing:
        raise _broken(
            f"{folder / CONFIG_NAME} with other values of {differing}",
            f"{ {key: wanted.get(key) for key in differing} }, as its {_OWN_KEY!r} block says",
        )
    try:
        read_through(folder / WEIGHTS_NAME)
        tensors = load_file(folder / WEIGHTS_NAME)
    except (OSError, SafetensorError, RuntimeError) as error:  # the last: torch cannot open it
        raise _broken(f"{folder / WEIGHTS_NAME}: {error}", "readable safetensors") from error
    check_tensors(tensors, config)
    vocabulary = DraftVocabulary.from_tensors(tensors, source=str(folder / WEIGHTS_NAME))
    with torch.device("meta"):
        model = Drafter(config)
    state = {name: t for name, t in tensors.items() if name not in vocabulary.tensors()}
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval(), vocabulary, config


def check_tensors(tensors: Mapping[str, Tensor], config: DrafterConfig) -> None:
    """ExportError unless names, shapes and dtypes are each server's whole table, values finite."""
    for server, table in TABLES.items():
        missing, extra = sorted(set(table) - set(tensors)), sorted(set(tensors) - set(table))
        if missing or extra:
            raise _broken(
                f"drafter without {missing} and with {extra}", f"exactly the names {server} reads"
            )
        shapes = table_shapes(table, config)
        kinds = {"float": EXPORT_DTYPE, "int64": torch.int64, "bool": torch.bool}
        for name, (_, kind) in table.items():
            tensor = tensors[name]
            if tuple(tensor.shape) != shapes[name] or tensor.dtype != kinds[kind]:
                raise _broken(
                    f"{name} {tensor.dtype} {list(tensor.shape)}",
                    f"{kinds[kind]} {list(shapes[name])}, as {server} reads it",
                )
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise _broken(f"{name} with values that are not finite", "finite values")


def server_config(
    config: DrafterConfig, *, architecture: str, origin: Origin | None
) -> dict[str, Any]:
    """config.json: keys of both servers, and our own block to read it back.

    architecture: the target's class. Rotary settings stand in the old spelling (rope_theta,
    rope_scaling) and in transformers 5's (rope_parameters). SGLang reads its layer ids inside
    eagle_config only (else it takes defaults in silence); vLLM the key of the same name outside.
    """
    scaling = None if config.rope_type == "default" else dict(config.rope_scaling or {})
    if scaling is not None:
        scaling = {**scaling, "rope_type": config.rope_type}
        scaling.pop("type", None)
    rope = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "attention_bias": False,
        "bias": False,
        "draft_vocab_size": config.draft_vocabulary_size,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": server_layer_ids("vllm", architecture, config.taps),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": server_layer_ids(
                "sglang", architecture, config.taps
            ),
            "use_aux_hidden_state": True,
        },
        "fc_norm": False,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "norm_before_residual": False,
        "norm_output": config.norm_output,
        "num_attention_heads": config.heads,
        "num_aux_hidden_states": len(config.taps),
        "num_hidden_layers": 1,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "rope_scaling": scaling,
        "rope_theta": config.rope_theta,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": config.target_vocabulary_size,
        _OWN_KEY: {
            "drafter": config.to_json(),
            "target_architecture": architecture,
            "origin": None if origin is None else dataclasses.asdict(origin),
        },
    }


def check_target(config: DrafterConfig, target: TargetFacts, taps: Sequence[int]) -> None:
    """ExportError unless the drafter is made for this target and both servers can run it there.

    Known from the settings, so that no training need end in a drafter that cannot be exported.
    """
    for server in TABLES:
        server_layer_ids(server, target.architecture, config.taps)
    if tuple(taps) != config.taps or max(config.taps) >= target.layers:
        raise _broken(
            f"taps {list(config.taps)} in the drafter, {list(taps)} in the shards, "
            f"{target.layers} layers in the target",
            "the same taps, each below the layer count",
        )
    for name, drafter, wanted in (
        ("width", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.target_vocabulary_size, target.vocabulary_size),
    ):
        if drafter != wanted:
            raise _broken(f"drafter for a target {name} of {drafter}", f"{wanted}, the target's")
    if config.max_position_embeddings < target.max_position_embeddings:
        raise ExportError(
            f"drafter position limit {config.max_position_embeddings}",
            wanted=f"at least the target's {target.max_position_embeddings}: servers size the "
            "rotary table by it",
            next_step="set the drafter's max_position_embeddings to the target's",
        )


def _own_block(folder: Path, values: Any) -> dict[str, Any]:
    own = values.get(_OWN_KEY) if isinstance(values, dict) else None
    if not isinstance(own, dict) or set(own) != _OWN_KEYS:
        raise _broken(
            f"{folder / CONFIG_NAME} without a whole {_OWN_KEY!r} block",
            f"a drafter that this version exported, with {sorted(_OWN_KEYS)}",
        )
    origin = own["origin"]
    if origin is not None and not (
        isinstance(origin, dict)
        and origin.keys() == {"target", "tokens"}
        and all(isinstance(one, str) for one in origin.values())
    ):
        raise _broken(f"{folder / CONFIG_NAME} with origin {origin!r:.80}", "target and tokens")
    return own


def _broken(found: str, wanted: str) -> ExportError:
    return ExportError(
        found, wanted=wanted, next_step="export again from a checkpoint: make export"
    )
