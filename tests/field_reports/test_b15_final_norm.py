"""B15: the final state is the one behind the last norm, and everybody who reads it knows.

That the drafter's recursion is the one that is served: tests/draft/test_ttt.py (against
tests/draft/reference.py) and tests/evaluation/test_rebuilt_rows.py; by the real server:
tests/sglang/test_served_run.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.slate.files import read_json, write_json
from pipeline.stages.extract import greatest_difference
from pipeline.store.index import Sample
from pipeline.store.reader import StateDataset
from pipeline.target.load import decoder_layers, load_target
from pipeline.target.tensors import read_head

from .states_fixtures import Job, captured, copied_job, tiny_target

__all__ = ["captured", "tiny_target"]

ROUNDING = 2.0**-8  # of one number to bfloat16's eight bits


class Own:
    """What the target itself computes of a sample: logits [n, V], the state before the norm."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_target(folder, dtype=torch.float32, device="cpu")
        self.before_norm = torch.empty(0)
        decoder_layers(self.model)[-1].register_forward_hook(self._keep)

    def _keep(self, _module: Any, _arguments: Any, output: Any) -> None:
        self.before_norm = (output[0] if isinstance(output, tuple) else output).reshape(-1, 32)

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids.long()[None]).logits[0]
        return logits


@pytest.fixture(scope="module")
def own(tiny_target: Path) -> Own:
    return Own(tiny_target)


def test_the_final_norm_of_this_target_is_uneven(tiny_target: Path) -> None:
    norm = load_file(tiny_target / "model.safetensors")["model.norm.weight"].float()
    assert norm.min() < 0.35
    assert norm.max() > 2.8


def test_rebuilt_logits_are_the_target_s_own_at_every_position(captured: Job, own: Own) -> None:
    head = read_head(captured.target).float()
    dataset = StateDataset.open(captured.folder / "extract")
    assert len(dataset.entries) == 6
    for entry in dataset.entries:
        states = dataset.read(entry)
        rebuilt = states.final.float() @ head.T
        wanted = own.logits(states.input_ids)
        # Each of the 32 products may be off by the rounding of its state, and no more.
        bound = ROUNDING * (states.final.float().abs() @ head.abs().T) + 1e-4
        assert bool(((rebuilt - wanted).abs() <= bound).all())
        assert bool((bound < 0.2).all())
        unnormed = own.before_norm.bfloat16().float() @ head.T
        assert float((unnormed - wanted).abs().max()) > 2.0


def test_states_before_the_norm_do_not_agree_with_the_engine_s_log_probabilities(
    captured: Job, own: Own
) -> None:
    head = read_head(captured.target)
    dataset = StateDataset.open(captured.folder / "extract")
    entry = dataset.entries[0]
    states = dataset.read(entry)
    sample = Sample(entry.id, states.input_ids, states.supervised, entry.split)
    scores = torch.log_softmax(own.logits(states.input_ids), dim=-1)
    engine = scores[:-1].gather(1, states.input_ids[1:, None].long())[:, 0].tolist()
    assert greatest_difference(sample, states.final, engine, head=head) < 0.05
    # The stage refuses above extract.logprob_tolerance, 0.25.
    assert greatest_difference(sample, own.before_norm.bfloat16(), engine, head=head) > 0.5


def test_the_data_set_says_on_which_side_of_the_norm_it_was_taken(captured: Job) -> None:
    told = read_json(captured.folder / "extract" / "dataset.json")
    assert told["final_convention"] == "after the final norm"


@pytest.mark.parametrize("said", ["before the final norm", None])
def test_a_data_set_that_says_otherwise_is_refused_before_training(
    captured: Job, tmp_path: Path, said: str | None
) -> None:
    job = copied_job(captured, tmp_path)
    facts = job.folder / "extract" / "dataset.json"
    write_json(facts, {**read_json(facts), "final_convention": said})
    assert "changed after the seal" in job.refused("train")
    job.reseal("extract", "dataset.json")
    error = job.refused("train")
    assert f"final_convention is {said!r}" in error
    assert "wanted: 'after the final norm'" in error
    assert not job.begun("train")
