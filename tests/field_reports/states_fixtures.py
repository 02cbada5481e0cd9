"""What the field reports about states, targets and layers share: toy targets, and runs on them."""

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.capture.stand_in import prefix_states
from pipeline.cli import main
from pipeline.slate.files import sha256_file
from pipeline.slate.log import SAY
from pipeline.slate.manifest import Manifest
from pipeline.store.reader import StateDataset
from pipeline.target.random import make_random_target

HIDDEN, LAYERS, VOCABULARY = 32, 8, 320
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIXTY_FOUR = "You are a helper. " * 6  # some 64 tokens of the toy tokenizer
TALKS = [
    ("", "What is the capital of Peru?", "Lima is the capital of Peru."),
    ("", "How much is one and one?", "It is two."),
    ("", "Why is the sky blue?", "Blue light is scattered more."),
    ("", "Who wrote Hamlet?", "Shakespeare."),  # 40 tokens
    (SIXTY_FOUR, "What is a desert?", "A place with little rain."),
    (SIXTY_FOUR, "Who lives there?", "Camels and snakes."),
]


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    status: int
    said: str
    error: str


@contextlib.contextmanager
def _screen_given_back() -> Any:
    before = (SAY.handlers[:], SAY.propagate, SAY.level)
    SAY.handlers[:] = []
    try:
        yield
    finally:
        for handler in SAY.handlers:
            handler.close()
        SAY.handlers[:], SAY.propagate = before[0], before[1]
        SAY.setLevel(before[2])


def cli(*arguments: str) -> Done:
    """The public command, in this process: `python -m pipeline.cli` without its start."""
    said, error, status = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(error),
        _screen_given_back(),
    ):
        patch.setattr(sys, "argv", ["cleanslate", *arguments])
        try:
            main()
        except SystemExit as leaving:
            status = int(leaving.code or 0)
    return Done(status, said.getvalue(), error.getvalue())


class Job:
    """A run on a target that lies in a folder, driven by the public commands."""

    def __init__(self, root: Path, target: Path, **extract: Any) -> None:
        self.root, self.target = root, target
        self.folder = root / "runs" / "job"
        talks = root / "talks.jsonl"
        talks.write_text("".join(json.dumps({"messages": _talk(*one)}) + "\n" for one in TALKS))
        profile = {
            "extends": "tiny",
            "target": {"source": {"kind": "folder", "path": str(target)}},
            "run": {"root": str(root / "runs")},
            "prepare": {"input": str(talks), "answers": "file"},
            "extract": {"staging": str(root / "staging"), **extract},
            "draft": {"vocabulary_size": 100},
            "train": {"epochs": 1},
        }
        self.profile = root / "job.yaml"
        self.profile.write_text(yaml.safe_dump(profile))

    def run(self, command: str, *sets: str) -> Done:
        pairs = [part for pair in sets for part in (pair if pair[0] == "-" else f"--set={pair}",)]
        return cli(command, "--profile", str(self.profile), *pairs)

    def good(self, command: str, *sets: str) -> str:
        done = self.run(command, *sets)
        assert done.status == 0, done.said + done.error
        return done.said

    def refused(self, command: str, *sets: str) -> str:
        """The error of a command that was refused and explained."""
        done = self.run(command, *sets)
        assert done.status == 1, done.said + done.error
        assert "Traceback" not in done.error
        assert "wanted:" in done.error
        assert "next:" in done.error
        return done.error

    def begun(self, stage: str) -> bool:
        """Whether a stage came as far as its wipe, or further."""
        return (self.folder / stage).exists()

    def reseal(self, stage: str, file: str, **settings: Any) -> None:
        """Seals a stage again after one of its files was changed, as another program might."""
        output = self.folder / stage
        manifest = Manifest.read(output)
        changed = replace(
            manifest.files[file],
            bytes=(output / file).stat().st_size,
            sha256=sha256_file(output / file),
        )
        replace(
            manifest,
            files={**manifest.files, file: changed},
            settings={**manifest.settings, **settings},
        ).write(output)


def _talk(system: str, question: str, answer: str) -> list[dict[str, str]]:
    turns = [("system", system)] if system else []
    turns += [("user", question), ("assistant", answer)]
    return [{"role": role, "content": text} for role, text in turns]


def copied_job(job: Job, root: Path, **extract: Any) -> Job:
    """A job of its own, with the outputs of another one on the same target."""
    shutil.copytree(job.root, root, dirs_exist_ok=True)
    return Job(root, job.target, **extract)


def random_target(folder: Path, *, seed: int = 7, layers: int = LAYERS) -> Path:
    make_random_target(
        folder,
        seed=seed,
        hidden_size=HIDDEN,
        layers=layers,
        heads=4,
        kv_heads=2,
        intermediate_size=64,
        vocabulary_size=VOCABULARY,
    )
    return folder


def fingerprint_target(folder: Path) -> Path:
    """A Llama whose layer i adds 10^i to channel 0 of every row, and does nothing else."""
    random_target(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING][:, 0] = 0
    for layer in range(LAYERS):
        room = f"model.layers.{layer}.self_attn"
        weights[f"{room}.o_proj.weight"].zero_()
        weights[f"model.layers.{layer}.mlp.down_proj.weight"].zero_()
        for name, width in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
            weights[f"{room}.{name}_proj.bias"] = torch.zeros(width, dtype=torch.bfloat16)
        # bfloat16 holds 1 to 1000 as they are, 10^4 as 9984 and so on: written in float32.
        weights[f"{room}.o_proj.bias"] = torch.zeros(32)
        weights[f"{room}.o_proj.bias"][0] = 10.0**layer
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def toy_checkpoint(
    folder: Path,
    *,
    like: Path,
    config: Mapping[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    shards: Mapping[str, Mapping[str, Tensor]] | None = None,
    index: Mapping[str, Any] | None = None,
) -> Path:
    """A folder with the tokenizer of another one, and with these weights and this config."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(like / name, folder / name)
    told = json.loads((like / "config.json").read_text()) if config is None else config
    (folder / "config.json").write_text(json.dumps(told))
    if shards is None:
        shards = {"model.safetensors": weights or load_file(like / "model.safetensors")}
    for name, tensors in shards.items():
        save_file(dict(tensors), folder / name, metadata={"format": "pt"})
    if index is not None:
        text = json.dumps({"metadata": {}, "weight_map": dict(index)})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


_MADE: dict[str, Any] = {}  # a session fixture that is imported is one a module; these are one


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "target" not in _MADE:
        _MADE["target"] = random_target(tmp_path_factory.mktemp("target"))
    return Path(_MADE["target"])


@pytest.fixture(scope="session")
def captured(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """States of the tiny target by transformers. Not to be changed."""
    if "captured" not in _MADE:
        job = Job(tmp_path_factory.mktemp("captured"), tiny_target)
        job.good("extract")
        _MADE["captured"] = job
    job = _MADE["captured"]
    assert isinstance(job, Job)
    return job


@pytest.fixture(scope="session")
def fingerprinted(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """An exported drafter for the fingerprint target, of heads that do not divide its width."""
    if "fingerprinted" not in _MADE:
        root = tmp_path_factory.mktemp("fingerprinted")
        job = Job(root, fingerprint_target(root / "target"), taps=[1, 3, 6])
        job.good("export", "draft.heads=5", "draft.kv_heads=5")
        _MADE["fingerprinted"] = job
    job = _MADE["fingerprinted"]
    assert isinstance(job, Job)
    return job


@pytest.fixture(scope="session")
def prepared(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The talks, prepared for the tiny target. Not to be changed."""
    if "prepared" not in _MADE:
        job = Job(tmp_path_factory.mktemp("prepared"), tiny_target)
        job.good("prepare")
        _MADE["prepared"] = job
    job = _MADE["prepared"]
    assert isinstance(job, Job)
    return job


def served(prepared: Job, root: Path, **faults: Any) -> Job:
    """A job whose states come from the stand-in of SGLang in states_server, with its faults."""
    installed = root / "installed"
    for name, version in (("sglang", "0.5.23"), ("cleanslate", "0")):
        info = installed / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ncleanslate = pipeline.capture.sglang_plugin.hooks:register\n"
    )
    here = Path(__file__).parent
    paths = ":".join(map(str, (here / "states_server", installed, here.parents[1])))
    python = root / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (root / "faults.json").write_text(json.dumps(faults))
    server = {
        "python": str(python),
        "device": "cpu",
        "tensor_parallel": 1,
        "chunked_prefill_tokens": 16,
        "request_timeout_seconds": 2,
        "startup_timeout_seconds": 60,
        "extra_arguments": ["--faults", str(root / "faults.json")],
    }
    return copied_job(prepared, root, engine="sglang", server=server)


def assert_every_row_is_right(job: Job, *, taps: tuple[int, ...] = (1, 3, 4)) -> set[str]:
    """Every stored row is the function of its whole prefix; gives the ids of the samples."""
    dataset = StateDataset.open(job.folder / "extract")
    assert dataset.taps == taps
    for entry in dataset.entries:
        states = dataset.read(entry)
        wanted = prefix_states(states.input_ids, hidden_size=HIDDEN, channels=4)
        assert torch.equal(torch.stack([*states.taps, states.final]), wanted)
    return {entry.id for entry in dataset.entries}
