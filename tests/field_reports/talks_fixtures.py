"""A small target with any chat template, and `prepare` on it by the public front, in process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.slate.files import read_json
from pipeline.store.reader import PreparedSamples
from pipeline.target.random import make_random_target
from pipeline.target.tokenizer import load_tokenizer
from tests.field_reports.in_process import Done, front

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


class Talks:
    """Prepares conversations for one target, each time from a clean slate."""

    def __init__(self, root: Path, target: Path) -> None:
        self.root, self.target = root, target
        self.output = root / "runs" / "tiny" / "prepare"
        self._tokenizer: Any = None

    def arguments(self, source: Path, *more: str) -> list[str]:
        kind = json.dumps({"kind": "folder", "path": str(self.target)})
        return [
            *("prepare", "--profile", "tiny", "--input", str(source)),
            *("--set", f"run.root={self.root / 'runs'}", "--set", f"target.source={kind}", *more),
        ]

    def prepare(self, source: Path, *more: str) -> Done:
        return front(*self.arguments(source, *more))

    def write(self, records: list[Any], name: str = "talks.jsonl") -> Path:
        path = self.root / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    def kept(self, records: list[Any], *more: str) -> dict[str, Any]:
        """Counts of a run that must end well."""
        done = self.prepare(self.write(records), *more)
        assert done.status == 0, done.out + done.err
        return self.counts()

    def refused(self, source: Path, *more: str) -> str:
        done = self.prepare(source, *more)
        assert done.status == 1, done.out + done.err
        assert "wanted:" in done.err
        assert "next:" in done.err
        assert "prepare: sealed in" not in done.out
        return done.err

    def counts(self) -> dict[str, Any]:
        return dict(read_json(self.output / "manifest.json")["counts"])

    def skips(self) -> list[dict[str, str]]:
        lines = (self.output / "skipped.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def tokenizer(self) -> Any:
        self._tokenizer = self._tokenizer or load_tokenizer(self.target, remote_code=False)
        return self._tokenizer

    def samples(self) -> list[tuple[list[int], list[bool]]]:
        """(ids, mask) of every sample, in the order of the file."""
        samples = PreparedSamples.open(self.output)
        found = [samples.read(entry) for entry in samples.entries]
        return [(one.input_ids.tolist(), one.supervised.tolist()) for one in found]

    def islands(self) -> list[tuple[list[str], list[str]]]:
        """The texts of supervised and of other runs of tokens, of every sample."""
        return [self._texts(*sample) for sample in self.samples()]

    def _texts(self, ids: list[int], mask: list[bool]) -> tuple[list[str], list[str]]:
        runs: list[tuple[bool, list[int]]] = []
        for token, mark in zip(ids, mask, strict=True):
            if not runs or runs[-1][0] != mark:
                runs.append((mark, []))
            runs[-1][1].append(token)
        text = [(mark, self.tokenizer.decode(run)) for mark, run in runs]
        return [t for mark, t in text if mark], [t for mark, t in text if not mark]


def make_target(folder: Path) -> Path:
    """A random target: byte-level BPE, ChatML and reasoning markers, own post-processor."""
    make_random_target(
        folder,
        seed=3,
        hidden_size=32,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate_size=64,
        vocabulary_size=400,
    )
    return folder


def with_template(target: Path, folder: Path, template: str | None) -> Path:
    """A copy of a target with another chat template."""
    shutil.copytree(target, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    return folder


def talk(*turns: str, **fields: Any) -> dict[str, Any]:
    """Turns that alternate user, assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": messages, **fields}


@pytest.fixture(name="plain_target", scope="session")
def plain_target_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as it is made, with the ChatML template."""
    return make_target(tmp_path_factory.mktemp("talks") / "target")


@pytest.fixture(name="talks")
def talks_fixture(plain_target: Path, tmp_path: Path) -> Talks:
    """Conversations for the plain target."""
    return Talks(tmp_path, plain_target)
