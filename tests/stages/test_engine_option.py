"""`make evaluate ENGINE=sglang` after a run by transformers: what is sealed keeps its engine."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.slate.manifest import Manifest
from pipeline.stages.overrides import engine_overrides


def seal(folder: Path, stage: str, settings: dict[str, Any]) -> None:
    (folder / stage).mkdir(parents=True)
    Manifest(
        stage=stage, settings=settings, inputs={}, counts={}, facts={}, files={}, provenance={}
    ).write(folder / stage)


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [
        ("target", []),
        ("prepare", ["prepare.answering.engine=sglang"]),
        ("extract", ["extract.engine=sglang"]),
        ("train", ["extract.engine=sglang"]),
        ("export", ["extract.engine=sglang"]),
        ("evaluate", ["extract.engine=sglang", "evaluate.engine=sglang"]),
        ("report", ["extract.engine=sglang", "evaluate.engine=sglang"]),
    ],
)
def test_with_nothing_sealed_it_is_the_engine_of_extraction_and_evaluation(
    tmp_path: Path, stage: str, wanted: list[str]
) -> None:
    assert engine_overrides(stage, "sglang", folder=tmp_path) == wanted


def test_transformers_is_the_loops_engine(tmp_path: Path) -> None:
    found = engine_overrides("evaluate", "transformers", folder=tmp_path)
    assert found == ["extract.engine=transformers", "evaluate.engine=loop"]


def test_sealed_stages_before_the_named_one_keep_their_engine(tmp_path: Path) -> None:
    seal(tmp_path, "prepare", {"answers": "target", "answering": {"batch_size": 4}})
    seal(tmp_path, "extract", {"engine": "transformers"})
    seal(tmp_path, "evaluate", {"engine": "loop"})
    assert engine_overrides("evaluate", "sglang", folder=tmp_path) == [
        "prepare.answering.engine=transformers",
        "extract.engine=transformers",
        "evaluate.engine=sglang",
    ]
    assert engine_overrides("report", "sglang", folder=tmp_path)[-1] == "evaluate.engine=loop"


def test_the_named_stage_starts_over_with_the_named_engine(tmp_path: Path) -> None:
    seal(tmp_path, "prepare", {"answers": "target", "answering": {"engine": "sglang"}})
    seal(tmp_path, "extract", {"engine": "transformers"})
    assert engine_overrides("extract", "sglang", folder=tmp_path) == [
        "prepare.answering.engine=sglang",
        "extract.engine=sglang",
    ]
