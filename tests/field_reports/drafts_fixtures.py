"""A tiny run of a target with 8192 positions, and changes to its sealed outputs, for B08 to B28.

Commands run in this process, but for the trainer and the engine, which are processes of their own.
"""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.slate.files import read_json, sha256_file, write_json
from pipeline.slate.manifest import Manifest, SealedFile
from pipeline.store.index import Entry, ShardIndex, sample_digest
from pipeline.store.layout import ShardLayout, state_fields
from pipeline.store.reader import MappedShard
from pipeline.target.random import make_random_target
from tests.field_reports.in_process import Done, front

SIZES = {"hidden_size": 64, "layers": 6, "heads": 4, "kv_heads": 2, "intermediate_size": 128}
V, D, POSITIONS = 512, 64, 8192
QUESTIONS = {
    "a": "why does the {} sleep in the cool night and not by day",
    "b": "({0}) + [{0}*{0}] = 10{0} - 7, 365 or 1600?",
}
WORDS = "sun sea wheel city river steam poem train book desert rice oil salt play"


class Tiny:
    """One run folder; the target and the conversations lie beside it."""

    def __init__(self, root: Path, *, text: str = "a") -> None:
        self.root, self.text = root, text
        self.folder = root / "runs" / "tiny"

    def run(self, command: str, *more: str) -> Done:
        kind = json.dumps({"kind": "folder", "path": str(self.root / "target")})
        values = {
            "run.root": self.root / "runs",
            "extract.staging": self.root / "staging",
            "target.source": kind,
            "prepare.max_length": 128,
            "draft.vocabulary_size": D,
            "train.learning_rate": 0.01,
        }
        settings = [f"{key}={value}" for key, value in values.items()]
        options = [part for setting in settings for part in ("--set", setting)]
        source = self.root / f"{self.text}.jsonl"
        asked = ("--profile", "tiny", "--input", str(source), "--answers", "target")
        return front(command, *asked, *options, *more)

    def good(self, command: str, *more: str) -> str:
        done = self.run(command, *more)
        assert done.status == 0, done.out + done.err
        return done.out

    def refused(self, command: str, *more: str) -> str:
        """The error of a command that must refuse, and leave the stage's sealed output alone."""
        stage = self.folder / command
        before = Manifest.read(stage).digest
        done = self.run(command, *more)
        assert done.status == 1, done.out + done.err
        assert "wanted:" in done.err
        assert "next:" in done.err
        assert Manifest.read(stage).digest == before
        return done.err

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "train" / "metrics.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    @property
    def checkpoint(self) -> Path:
        return max((self.folder / "train" / "checkpoints").glob("step-*"))

    def exported(self) -> dict[str, Tensor]:
        return load_file(self.folder / "export" / "model.safetensors")

    def change_checkpoint(
        self,
        tensors: Callable[[dict[str, Tensor]], object] = lambda _: None,
        state: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> None:
        """Another last checkpoint, as whole and as sealed as the old one."""
        path = self.checkpoint / "model.safetensors"
        held = load_file(path)
        tensors(held)
        save_file(held, path)
        said = read_json(self.checkpoint / "state.json")
        state(said)
        said["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        write_json(self.checkpoint / "state.json", said)
        self.reseal("train")

    def change_states(self, name: str, change: Callable[[Tensor, Entry], object]) -> None:
        """Other values in a field of all captured samples, as whole and as sealed as before.

        change: is given a sample's rows, to be changed in place, and its entry.
        """
        folder = self.folder / "extract"
        [path] = folder.glob("states-*.json")
        index = ShardIndex.read(path)
        fields = state_fields(SIZES["hidden_size"], taps=3)
        layout = ShardLayout(fields, index.rows)
        [field] = [field for field in fields if field.name == name]
        data = bytearray((folder / index.shard).read_bytes())
        for entry in index.entries:
            start = layout.offsets()[name] + entry.offset * field.row_bytes
            rows = torch.frombuffer(
                data, dtype=field.dtype, count=entry.length * (field.width or 1), offset=start
            )
            change(rows.view(field.shape(entry.length)), entry)
        (folder / index.shard).write_bytes(data)
        shard = MappedShard(folder / index.shard, layout=layout)
        entries = tuple(
            replace(e, digest=sample_digest(fields, shard.rows(e.offset, e.length)))
            for e in index.entries
        )
        sha256 = sha256_file(folder / index.shard)
        replace(index, sha256=sha256, entries=entries).write(path)
        self.reseal("extract")

    def reseal(self, stage: str) -> None:
        """Makes the manifest agree with the files again."""
        folder = self.folder / stage
        manifest = Manifest.read(folder)
        files = {
            name: SealedFile((folder / name).stat().st_size, sha256_file(folder / name), f.volatile)
            for name, f in manifest.files.items()
        }
        replace(manifest, files=files).write(folder)


@functools.cache
def made(root: Path) -> Tiny:
    """The run up to `export`, once for all test files of a process."""
    root.mkdir()
    make_random_target(root / "target", seed=7, vocabulary_size=V, **SIZES)
    config = read_json(root / "target" / "config.json")
    write_json(root / "target" / "config.json", {**config, "max_position_embeddings": POSITIONS})
    for name, question in QUESTIONS.items():
        texts = [question.format(word) for word in WORDS.split()]
        lines = [{"messages": [{"role": "user", "content": text}]} for text in texts]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiny = Tiny(root)
    (root / "said.txt").write_text(tiny.good("export"))
    return tiny


@pytest.fixture(scope="session")
def exported_run(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The run up to `export`. Not to be changed."""
    return made(tmp_path_factory.getbasetemp() / "drafts")


def copy_of(run: Tiny, root: Path, *, text: str = "a") -> Tiny:
    """A copy with target and conversations; another text starts without any output."""
    shutil.copytree(run.root, root, ignore=shutil.ignore_patterns("runs" if text != "a" else ""))
    return Tiny(root, text=text)


@pytest.fixture
def copied_run(exported_run: Tiny, tmp_path: Path) -> Tiny:
    """A copy of it, to be changed."""
    return copy_of(exported_run, tmp_path / "copy")
