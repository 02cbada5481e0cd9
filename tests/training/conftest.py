"""A tiny target, states and map on disk, and requests to train on them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.draft.vocabulary import build_vocabulary
from pipeline.store.layout import state_fields
from pipeline.store.reader import DatasetFacts
from pipeline.store.writer import PlannedSample, ShardBuilder
from pipeline.target.facts import TargetFacts, fingerprint
from pipeline.training.request import TrainRequest

V, D, H, TAPS = 48, 24, 16, (1, 2, 3)
DRAFTER: dict[str, Any] = {
    "hidden_size": H,
    "target_hidden_size": H,
    "intermediate_size": 32,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "draft_vocabulary_size": D,
    "target_vocabulary_size": V,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "norm_output": False,
    "taps": list(TAPS),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """`train` sets the number of threads of the process it runs in; tests share one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Given:
    """One sample of a test dataset: its number of rows, supervised positions, and split."""

    rows: int
    supervised: tuple[int, ...]
    split: str = "train"
    poison: bool = False


def make_target(folder: Path) -> Path:
    folder.mkdir()
    draw = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(V, H, generator=draw).bfloat16()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    save_file(weights, folder / "model.safetensors")
    config = {"vocab_size": V, "hidden_size": H, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_dataset(folder: Path, target: Path, *, given: list[Given], seed: int = 2) -> Path:
    folder.mkdir()
    fields = state_fields(H, taps=3)
    plan = [PlannedSample(f"c-{n}", g.rows, g.split) for n, g in enumerate(given)]
    builder = ShardBuilder(folder, "states-00000", fields=fields, plan=plan)
    draw = torch.Generator().manual_seed(seed)
    for number, sample in enumerate(given):
        n = sample.rows
        mask = torch.zeros(n, dtype=torch.bool)
        mask[list(sample.supervised)] = True
        rows: dict[str, Tensor] = {
            f.name: torch.randn(n, H, generator=draw).bfloat16() for f in fields if f.width
        }
        if sample.poison:
            rows["tap_1"][1, 3] = float("nan")  # later rows attend to row 1
        rows["input_ids"] = torch.randint(0, V, (n,), generator=draw, dtype=torch.int32)
        builder.place(f"c-{number}", {**rows, "supervised": mask})
    builder.finish()
    DatasetFacts(H, TAPS, fingerprint(target), 1).write(folder)
    return folder


def ordinary(count: int = 10, held_out: int = 2) -> list[Given]:
    """Samples of 12 to 20 rows, the second half supervised."""
    return [
        Given(
            12 + n % 9,
            tuple(range(6, 12 + n % 9)),
            "held_out" if n >= count - held_out else "train",
        )
        for n in range(count)
    ]


@pytest.fixture
def facts() -> TargetFacts:
    """What an export needs to know of the target of `ask`."""
    return TargetFacts(
        hidden_size=H,
        layers=4,
        vocabulary_size=V,
        heads=2,
        kv_heads=1,
        head_dim=8,
        intermediate_size=32,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=128,
        architecture="LlamaForCausalLM",
        model_type="llama",
        dtype="bfloat16",
        tied=False,
        eos_token_ids=(2,),
    )


@pytest.fixture
def sample() -> type[Given]:
    """`Given`, which importlib mode does not let a test file import by name."""
    return Given


Ask = Callable[..., TrainRequest]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Makes a request over freshly written files; `given` chooses the samples."""
    target = make_target(tmp_path / "target")
    counts = torch.zeros(V, dtype=torch.int64)
    counts[::2] = 1
    vocabulary = tmp_path / "vocabulary.safetensors"
    build_vocabulary(counts, D).save(vocabulary)
    made: dict[int, Path] = {}

    def make(given: list[Given] | None = None, **changes: Any) -> TrainRequest:
        samples = ordinary() if given is None else given
        key = hash(tuple(samples))
        if key not in made:
            folder = tmp_path / f"dataset-{len(made)}"
            made[key] = make_dataset(folder, target, given=samples)
        values: dict[str, Any] = {
            "dataset": made[key],
            "draft_vocabulary": vocabulary,
            "target": target,
            "output": tmp_path / "output",
            "drafter": DRAFTER,
            "epochs": 2,
            "learning_rate": 1e-2,
            "tokens_per_pack": 40,
            "tokens_per_step": 80,
            "warmup_share": 0.25,
            "weight_decay": 0.01,
            "final_learning_rate_share": 0.1,
        }
        return TrainRequest(**{**values, **changes})

    return make
