import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.adoption.book import Book
from pipeline.adoption.dump import FILES, Dump
from pipeline.adoption.judge import Judge, Verdict
from pipeline.adoption.norm import read_norm
from pipeline.store.reader import PreparedSamples, StateDataset
from pipeline.target.tensors import read_embedding, read_head
from tests.stages.conftest import Project, good

Four = list[Tensor]
CHOSEN = (0, 1, 5, 8, 10, 14, 25, 36)  # of 37: the shortest, the longest, alike and unlike ones


@dataclass(frozen=True)
class Captured:
    """A run of the tiny profile up to extract: its samples, and the four states of each."""

    project: Project
    ids: list[list[int]]
    masks: list[list[int]]
    states: list[Four]

    def same_length(self, length: int) -> list[int]:
        return [number for number, ids in enumerate(self.ids) if len(ids) == length]

    def judge_of(self, root: Path) -> Judge:
        target = self.project.folder / "target"
        return Judge(
            root,
            Book(PreparedSamples.open(self.project.folder / "prepare")),
            head=read_head(target),
            embedding=read_embedding(target),
            norm=read_norm(target, hidden_size=64),
        )

    def judge(self, root: Path) -> dict[str, Verdict]:
        judge = self.judge_of(root)
        return {request.name: judge.judge(request) for request in Dump.scan(root).requests}


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    project = Project(tmp_path_factory.mktemp("captured"))
    good(project.run("extract"))
    dataset = StateDataset.open(project.folder / "extract")
    read = [dataset.read(entry) for entry in dataset.entries]
    return Captured(
        project,
        ids=[one.input_ids.tolist() for one in read],
        masks=[one.supervised.int().tolist() for one in read],
        states=[[*(tap.clone() for tap in one.taps), one.final.clone()] for one in read],
    )


@pytest.fixture
def judged(
    captured: Captured, tmp_path: Path
) -> Callable[[Callable[[int], Four | None]], list[str]]:
    """Writes what a function gives for each sample, and gives the outcome of each request."""

    def outcomes(change: Callable[[int], Four | None]) -> list[str]:
        for number in CHOSEN:
            states = change(number)
            if states is not None:
                write_request(tmp_path / "dump", number, states)
        found = captured.judge(tmp_path / "dump")
        return [
            "another" if one.outcome == "fits" and one.sample != int(name[4:]) else one.outcome
            for name, one in found.items()
        ]

    return outcomes


def write_request(root: Path, number: int, states: Four) -> Path:
    folder = root / f"req_{number}"
    folder.mkdir(parents=True)
    for name, tensor in zip(FILES, states, strict=True):
        torch.save(tensor.clone(), folder / name)  # noqa: TID251  the old system's format
    return folder


def write_samples(path: Path, captured: Captured) -> None:
    records = zip(captured.ids, captured.masks, strict=True)
    lines = [json.dumps({"input_ids": ids, "loss_mask": mask}) for ids, mask in records]
    path.write_text("\n".join(lines) + "\n")
