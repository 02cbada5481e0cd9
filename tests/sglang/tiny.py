"""Tiny targets of both classes, drafters for them, and servers of the real SGLang on the CPU."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from pipeline.capture.sglang_flags import server_environment, server_flags
from pipeline.capture.sglang_server import SglangServer
from pipeline.draft.config import DrafterConfig
from pipeline.draft.export import export_drafter
from pipeline.draft.model import Drafter
from pipeline.draft.vocabulary import build_vocabulary
from pipeline.settings.environment import child_environment, stage_environment
from pipeline.target.facts import read_facts
from pipeline.target.random import make_random_target

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
LAYERS, HIDDEN, VOCABULARY = 8, 64, 512


def make_llama(folder: Path) -> None:
    make_random_target(
        folder,
        seed=11,
        hidden_size=HIDDEN,
        layers=LAYERS,
        heads=4,
        kv_heads=2,
        intermediate_size=96,
        vocabulary_size=VOCABULARY,
    )


def make_deepseek(folder: Path) -> None:
    """Latent attention, one dense layer, then experts: the shape of DeepSeek-V3 and of Kimi."""
    make_llama(folder)  # for its tokenizer
    torch.manual_seed(12)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=3,
        pad_token_id=1,
        tie_word_embeddings=False,
        # The only rotary form that SGLang computes for this class on a CPU.
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
    )  # fmt: skip
    (folder / "model.safetensors").unlink()
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    # Names that published folders have and SGLang reads; transformers does not write them.
    published = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    path.write_text(json.dumps(json.loads(path.read_text()) | published))


TARGETS = {"LlamaForCausalLM": make_llama, "DeepseekV3ForCausalLM": make_deepseek}


def export_random_drafter(folder: Path, target: Path, taps: tuple[int, int, int]) -> None:
    """An export as `make export` writes it, with random weights."""
    facts = read_facts(target)
    config = DrafterConfig(
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        intermediate_size=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        draft_vocabulary_size=VOCABULARY // 2,
        target_vocabulary_size=facts.vocabulary_size,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        max_position_embeddings=facts.max_position_embeddings,
        norm_output=False,
        taps=taps,
    )
    generator = torch.Generator().manual_seed(13)
    counts = torch.randint(1, 9, (facts.vocabulary_size,), generator=generator)
    vocabulary = build_vocabulary(counts, config.draft_vocabulary_size)
    head = torch.randn(config.draft_vocabulary_size, config.hidden_size, generator=generator)
    model = Drafter.initialised(config, head_rows=head, seed=13)
    folder.mkdir(parents=True, exist_ok=True)
    export_drafter(folder, model.state_dict(), vocabulary, config, target=facts, taps=taps)


def start_server(
    model: Path,
    folder: Path,
    *,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    capture: Path | None = None,
    **changes: Any,
) -> SglangServer:
    """A server on the CPU in float32, not started yet; its log goes into `folder`."""
    told = server_flags(
        model=str(model),
        device="cpu",
        tensor_parallel=1,
        memory_fraction=0.3,
        cache_tokens=4096,
        dtype="float32",
        **({"chunked_prefill_tokens": 512, "max_running_requests": 8} | changes),
    )
    stage = stage_environment(
        threads=2,
        gpus=(),
        extra={
            **server_environment(
                device="cpu",
                tensor_parallel=1,
                cores=2,
                nccl={},
                capture=None if capture is None else str(capture),
            ),
            **(environment or {}),
        },
    )
    return SglangServer(
        [*told, *flags],
        python=PYTHON,
        environment=child_environment(stage),
        log=folder / "server.log",
        startup_timeout_seconds=300,
        say=print,
    )


def place_probe(folder: Path) -> dict[str, str]:
    """Installs the layer probe where only a server with this environment finds it."""
    found = folder / "found"
    shutil.copytree(ROOT / "tests" / "sglang" / "probe", found)
    facts = found / "layer_probe-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: layer-probe\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nlayer_probe = layer_probe:register\n"
    )
    seen = folder / "seen"
    seen.mkdir()
    return {"PYTHONPATH": str(found), "LAYER_PROBE": str(seen)}


def spread_layers(folder: Path) -> None:
    """Makes every layer of a target change the stream a lot, so that no two layers look alike."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(14)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            weights[name] = (tensor.float() + 2.0 * noise).to(tensor.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
