import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.draft.config import DrafterConfig
from pipeline.draft.export import export_drafter
from pipeline.draft.vocabulary import build_vocabulary
from pipeline.evaluation.acceptance import Outcome, summarise
from pipeline.evaluation.errors import EvaluationError, WrongDrafter
from pipeline.evaluation.worker import check_fit, read_prompts
from pipeline.target.facts import read_facts
from pipeline.target.random import make_random_target
from tests.evaluation.make import drafter_config, random_drafter, tiny_target

SIZE = 320


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Events of one real child on a random target and a random exported drafter."""
    folder = tmp_path_factory.mktemp("evaluation")
    make_random_target(
        folder / "target",
        seed=1,
        hidden_size=32,
        layers=5,
        heads=4,
        kv_heads=2,
        intermediate_size=48,
        vocabulary_size=SIZE,
    )
    config: DrafterConfig = drafter_config(
        draft_vocabulary_size=64, target_vocabulary_size=SIZE, max_position_embeddings=2048
    )
    (folder / "drafter").mkdir()
    export_drafter(
        folder / "drafter",
        random_drafter(config, dtype=torch.float32).state_dict(),
        build_vocabulary(torch.arange(SIZE), 64),
        config,
        target=read_facts(folder / "target"),
        taps=config.taps,
    )
    prompts = [{"id": f"p-{i}", "prompt_ids": [10 + i, 40, 90]} for i in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    request = {
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "prompts": str(folder / "prompts.jsonl"),
        "max_new_tokens": 12,
        "draft_tokens": 3,
        "dtype": "float32",
        "threads": 1,
        "end_ids": [],
    }
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.evaluation.worker"],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # noqa: TID251  the test's own child
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_worker_reports_every_prompt_in_order(run: list[dict[str, Any]]) -> None:
    assert [event["event"] for event in run] == ["loaded", *["prompt"] * 3, "done"]
    prompts = [event for event in run if event["event"] == "prompt"]
    assert [event["outcome"]["prompt"] for event in prompts] == ["p-0", "p-1", "p-2"]
    assert [(event["done"], event["total"]) for event in prompts] == [(1, 3), (2, 3), (3, 3)]


def test_worker_gives_outcomes_that_can_be_summed_up(run: list[dict[str, Any]]) -> None:
    outcomes = [Outcome.from_json(event["outcome"]) for event in run if event["event"] == "prompt"]
    assert summarise(outcomes, draft_tokens=3).identical == 3
    assert all(len(outcome.plain_ids) == 12 for outcome in outcomes)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"id": "p"}',
        '{"id": 3, "prompt_ids": [1]}',
        '{"id": "p", "prompt_ids": []}',
        '{"id": "p", "prompt_ids": [1, -2]}',
        '{"id": "p", "prompt_ids": [true]}',
        "[]",
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "first", "prompt_ids": [1]}\n' + line + "\n")
    with pytest.raises(EvaluationError, match="line 2"):
        read_prompts(path)


def test_no_prompts_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("")
    with pytest.raises(EvaluationError, match="no prompts"):
        read_prompts(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize(
    "changes", [{"target_vocabulary_size": 49}, {"hidden_size": 16, "target_hidden_size": 16}]
)
def test_a_drafter_of_another_target_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(WrongDrafter, match="a drafter for vocabulary"):
        check_fit(tiny_target(dtype=torch.float32), drafter_config(**changes), longest=10)


def test_an_answer_beyond_the_drafters_positions_is_refused() -> None:
    with pytest.raises(EvaluationError, match="prompt and answer of 300 tokens"):
        check_fit(tiny_target(dtype=torch.float32), drafter_config(), longest=300)
