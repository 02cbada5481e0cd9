"""Whole files of every kind, small, for `mutate.py` to spoil; all made by the product itself."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from pipeline.adoption.dump import FILES, Dump
from pipeline.adoption.judge import FITS, Verdict
from pipeline.adoption.survey import Journal
from pipeline.adoption.torch_file import Piece
from pipeline.draft.config import DrafterConfig
from pipeline.draft.export import export_drafter
from pipeline.draft.model import Drafter
from pipeline.draft.vocabulary import build_vocabulary
from pipeline.slate.files import sha256_file
from pipeline.slate.manifest import Manifest, SealedFile
from pipeline.slate.wipe import claim
from pipeline.store.layout import state_fields
from pipeline.store.reader import DatasetFacts
from pipeline.store.writer import PlannedSample, SampleWriter, ShardBuilder, to_sample
from pipeline.target.facts import read_facts
from pipeline.target.random import make_random_target
from pipeline.training.checkpoint import Position, write_checkpoint
from tests.hostile.host import make_host
from tests.hostile.readers import ABOUT, IDS, TALK

H, V, D = 32, 320, 16


def make_target(folder: Path) -> None:
    make_random_target(
        folder, seed=7, hidden_size=H, layers=4, heads=4, kv_heads=2, intermediate_size=32,
        vocabulary_size=V,
    )  # fmt: skip


def make_prepared(folder: Path) -> None:
    folder.mkdir()
    writer = SampleWriter(folder, shard_tokens=1000)
    for number in range(3):
        mask = [False, True, True, True]
        writer.add(to_sample(f"s-{number}", [1, 2, 3, number], supervised=mask, split="train"))
    writer.flush()


def make_states(folder: Path) -> None:
    folder.mkdir()
    plan = [PlannedSample("s-0", 4, "train"), PlannedSample("s-1", 3, "held_out")]
    builder = ShardBuilder(folder, "states-00000", fields=state_fields(4, taps=3), plan=plan)
    for one in plan:
        rows = {name: torch.ones(one.length, 4, dtype=torch.bfloat16) for name in _STATES}
        rows["input_ids"] = torch.arange(one.length, dtype=torch.int32)
        rows["supervised"] = torch.ones(one.length, dtype=torch.bool)
        builder.place(one.id, rows)
    builder.finish()
    DatasetFacts(4, (0, 1, 2), "ab" * 32, 1).write(folder)


_STATES = ("tap_0", "tap_1", "tap_2", "final")


def make_sealed(folder: Path) -> None:
    claim(folder, stage="demo", intent={"settings": {"a": 1}, "inputs": {"b": "c"}})
    (folder / "data.bin").write_bytes(b"data")
    files = {"data.bin": SealedFile(4, sha256_file(folder / "data.bin"), volatile=False)}
    Manifest("demo", {"a": 1}, {"b": "c"}, {"read": 1}, {"x": [1]}, files, {"log": "l"}).write(
        folder
    )


def _drafter() -> tuple[Drafter, DrafterConfig]:
    config = DrafterConfig(
        hidden_size=H, target_hidden_size=H, intermediate_size=32, heads=4, kv_heads=2, head_dim=8,
        draft_vocabulary_size=D, target_vocabulary_size=V, rope_theta=100.0, rope_scaling=None,
        rms_norm_eps=1e-5, max_position_embeddings=4096, norm_output=False, taps=(1, 2, 3),
    )  # fmt: skip
    return Drafter.initialised(config, head_rows=torch.ones(D, H), seed=0), config


def make_drafter(folder: Path, target: Path) -> None:
    folder.mkdir()
    model, config = _drafter()
    vocabulary = build_vocabulary(torch.arange(V), D)
    state, facts = model.state_dict(), read_facts(target)
    export_drafter(folder, state, vocabulary, config, target=facts, taps=(1, 2, 3))
    vocabulary.save(folder / "vocabulary.safetensors")


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    model, config = _drafter()
    return write_checkpoint(
        folder, position=Position(3, 0, 3), seed=1, model=model.state_dict(),
        optimizer={"updates": torch.tensor(3)}, vocabulary=build_vocabulary(torch.arange(V), D),
        data={"dataset": "ab"}, settings={"epochs": 2}, drafter=config.to_json(),
        outcome={"best": 1.5},
    )  # fmt: skip


def make_gguf(path: Path) -> None:
    """A llama of one layer, 32 wide, with a byte-level tokenizer."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in specials else 1 for token in tokens])
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(2)
    square, half = np.ones((32, 32), np.float32), np.ones((16, 32), np.float32)
    tensors = {
        "token_embd": np.ones((len(tokens), 32), np.float32),
        "output_norm": np.ones(32, np.float32),
        "blk.0.attn_norm": np.ones(32, np.float32), "blk.0.ffn_norm": np.ones(32, np.float32),
        "blk.0.attn_q": square, "blk.0.attn_k": half, "blk.0.attn_v": half,
        "blk.0.attn_output": square, "blk.0.ffn_gate": square, "blk.0.ffn_up": square,
        "blk.0.ffn_down": square,
    }  # fmt: skip
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_adoption(folder: Path) -> None:
    """A dump of one request, its samples, and the journal of what was decided."""
    request = folder / "dump" / "req_0"
    request.mkdir(parents=True)
    (folder / "prepared").mkdir()
    writer = SampleWriter(folder / "prepared", shard_tokens=1000)
    for number in range(2):
        mask = [False, *[True] * 11]
        ids = [(number + one) % 8 for one in range(12)]
        writer.add(to_sample(f"s-{number}", ids, supervised=mask, split="train"))
    writer.flush()
    for seed, name in enumerate(FILES):
        rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        torch.save(rows, request / name)  # noqa: TID251  the old system's format
    requests = Dump.scan(folder / "dump").requests
    verdict = Verdict(FITS, "d", 1, (Piece(12, 4, "bfloat16", 64, 64, 96, 7),) * 4, {"a": 0.5})
    with Journal(folder / "journal.jsonl", about=ABOUT).writing({}, requests) as note:
        note(requests[0], verdict)


STEP: dict[str, Any] = {
    "event": "step", "step": 1, "epoch": 0.5, "loss": 2.5, "accuracy": [0.5, None],
    "acceptance_length": 1.5, "learning_rate": 0.001, "updated": True,
}  # fmt: skip
REPLY: dict[str, Any] = {
    "meta_info": {
        "id": "r-1", "finish_reason": {"type": "length"}, "prompt_tokens": 5, "cached_tokens": 0,
        "input_token_logprobs": [[None, 0, None], *[[-1.0, n, None] for n in range(1, 5)]],
        "cleanslate_capture": [
            {"rid": "r-1", "ok": True, "file": "r-1.safetensors", "rows": 5, "spans": [[0, 5]],
             "ids_sha256": "ab", "dtype": "bfloat16", "taps": [0, 1, 2]}
        ],
    }
}  # fmt: skip
ANSWER: dict[str, Any] = {
    "output_ids": [1, 3],
    "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 2, "prompt_tokens": 2},
}
NCCL: dict[str, Any] = {
    "format": 1, "simulated": False, "measured_on": {"host": "h", "nccl": "2"}, "rows": [],
    "uses": {
        use: {"gpus": [0, 1], "environment": {"NCCL_ALGO": "Ring"}, "why": "fastest"}
        for use in ("extraction", "training")
    },
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "version": "1", "commit": "c0ffee", "dirty": False, "base": {"id": "sha256:b"},
    "images": {"trainer": {"id": "sha256:t", "variant": "cpu"}}, "inputs": {"VERSION": "aa"},
}  # fmt: skip
HOST = """
ready_host:
  gpus: null
  driver: null
  kernel: {command_line: [iommu=pt], acs_redirect: cleared, headers: true}
  states_tmpfs: {path: /mnt/hs, bytes: 1048576}
  sysctl: {vm.swappiness: 1}
  governor: performance
  limits: null
  logind: null
  containers: null
  run_user: null
  nccl: null
"""
PROFILE = """
extends: tiny
run: {root: runs, threads: 2}
train: {epochs: 2, betas: [0.9, 0.95], learning_rate: 0.001}
target: {end_of_turn: [a, b]}
"""


def make_all(root: Path) -> dict[str, Path]:
    """One whole file for each reader, in a folder of its own; `folder/name` by reader."""
    make_target(root / "target")
    make_prepared(root / "prepared")
    make_states(root / "states")
    make_sealed(root / "sealed")
    make_drafter(root / "drafter", root / "target")
    step = make_checkpoint(root / "checkpoints")
    (root / "gguf").mkdir()
    make_gguf(root / "gguf" / "model.gguf")
    make_adoption(root / "adoption")
    make_host(root / "host")
    plain = root / "plain"
    plain.mkdir()
    texts = {
        "reply": json.dumps(REPLY), "answer": json.dumps(ANSWER), "nccl": json.dumps(NCCL),
        "images": json.dumps(IMAGES), "ready_host": HOST, "profile": PROFILE,
        "override": "train.betas=[0.9, 0.95]",
        "answers": '{"id": "a", "prompt_ids": [1], "answer_ids": [2, 3], "finish_reason": "stop", '
        '"messages": [{"role": "user", "content": "hi"}]}\n',
        "samples": json.dumps({"input_ids": [1, 2], "loss_mask": [0, 1.0], "id": "a"}) + "\n",
        "metrics": json.dumps(STEP) + "\n" + json.dumps({**STEP, "event": "evaluation"}) + "\n",
        "prompts": json.dumps({"id": "a", "messages": TALK[:1]}) + "\n",
        "conversations": json.dumps({"messages": TALK, "tools": [{"a": 1}], "system": "s"}),
    }  # fmt: skip
    suffix = {
        "profile": ".yaml",
        "ready_host": ".yml",
        "conversations": ".jsonl",
        "samples": ".jsonl",
        "metrics": ".jsonl",
    }
    found = {}
    for name, text in texts.items():
        found[name] = plain / f"{name}{suffix.get(name, '.json')}"
        found[name].write_text(text)
    (root / "staging").mkdir()
    file = root / "staging" / "r-1.safetensors"
    states = {name: torch.ones(5, 4, dtype=torch.bfloat16) for name in _STATES}
    save_file({**states, "input_ids": IDS}, file)
    return found | {
        "json": found["nccl"],
        "dump": root / "adoption" / "dump" / "req_0" / "final.pt",
        "journal": root / "adoption" / "journal.jsonl",
        "metrics_resumed": found["metrics"],
        "host": root / "host" / "gpus",
        "shard_index": root / "prepared" / "samples-00000.json",
        "prepared": root / "prepared" / "samples-00000.safetensors",
        "states": root / "states" / "states-00000.safetensors",
        "manifest": root / "sealed" / "manifest.json",
        "marker": root / "sealed" / ".cleanslate.json",
        "checkpoint": step / "state.json",
        "target": root / "target" / "config.json",
        "target_model": root / "target" / "config.json",
        "tokenizer": root / "target" / "tokenizer.json",
        "template": root / "target" / "tokenizer_config.json",
        "drafter": root / "drafter" / "config.json",
        "vocabulary": root / "drafter" / "vocabulary.safetensors",
        "gguf": root / "gguf" / "model.gguf",
        "staging": file,
    }
