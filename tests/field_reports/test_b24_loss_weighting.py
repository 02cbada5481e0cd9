"""B24: one mean over all supervised pairs of a step, however they are laid out; steps round up."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.draft.config import DrafterConfig
from pipeline.draft.vocabulary import DraftVocabulary, build_vocabulary
from pipeline.store.reader import StateDataset
from pipeline.training.loop import train
from pipeline.training.ranks import Ranks
from pipeline.training.request import TrainRequest
from pipeline.training.start import start_run
from tests.draft.reference import dense_loss
from tests.field_reports import loss_layouts
from tests.field_reports.drafts_fixtures import exported_run  # noqa: F401
from tests.training.conftest import DRAFTER, D, Given, V, make_dataset, make_target

ALONE = Ranks(0, 1, torch.device("cpu"))
SUPERVISED = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Made:
    """A request over five samples and their padding, and the folder of all gradients."""

    request: TrainRequest
    folder: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("layouts")
    target = make_target(folder / "target")
    given = [Given(8 + n, tuple(range(4, 4 + n))) for n in SUPERVISED]
    given.append(Given(50, ()))
    build_vocabulary(torch.arange(V) % 2, D).save(folder / "vocabulary.safetensors")
    request = TrainRequest(
        dataset=make_dataset(folder / "dataset", target, given=given),
        draft_vocabulary=folder / "vocabulary.safetensors",
        target=target,
        output=folder / "output",
        drafter=DRAFTER,
        betas=(loss_layouts.FIRST_BETA, 0.95),
        tokens_per_pack=24,
        tokens_per_step=96,
    )
    (folder / "request.json").write_text(json.dumps(request.to_json()))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    loss_layouts.gradients(ALONE, folder)
    torch.set_num_threads(before)
    loss_layouts.start(folder, ranks=2)
    return Made(request, folder)


@pytest.fixture(scope="module")
def wanted(made) -> dict[str, Tensor]:
    """Loss and gradient by name, from the formulas: each sample alone, dense, in float64."""
    request = made.request
    run = start_run(request, ALONE)[0]
    named = run.optimizer.gather()[0]
    weights = {name: tensor.double().requires_grad_() for name, tensor in named.items()}
    tensors = load_file(request.target / "model.safetensors")
    vocabulary = DraftVocabulary.load(request.draft_vocabulary)
    dataset = StateDataset.open(request.dataset)
    losses, total = [], 0.0
    for entry in dataset.entries[:5]:
        states = dataset.read(entry)
        loss, weight, _ = dense_loss(
            weights,
            DrafterConfig.from_json(DRAFTER),
            ids=states.input_ids.long(),
            taps=torch.cat(states.taps, -1).double(),
            final=states.final.double(),
            supervised=states.supervised,
            document=torch.zeros(entry.length),
            position=torch.arange(entry.length),
            embedding=tensors["model.embed_tokens.weight"].double(),
            teacher_head=tensors["lm_head.weight"].double()[vocabulary.target_ids],
            target_ids=vocabulary.target_ids,
            steps=request.steps,
            decay=request.decay,
        )
        losses.append(loss)
        total += weight
    assert total == pytest.approx(31 * (1 + 0.8 + 0.64))  # 1 + 2 + 4 + 8 + 16 labels, three steps
    mean = torch.stack(losses).sum() / total
    mean.backward()
    return {"loss": mean.detach(), **{name: w.grad for name, w in weights.items()}}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", loss_layouts.LAYOUTS)
def test_loss_and_gradient_are_those_of_the_mean_over_all_pairs(made, wanted, name, ranks):
    found = loss_layouts.load(made.folder, name, ranks=ranks)
    assert found.keys() == wanted.keys()
    for key, right in wanted.items():
        scale = float(right.abs().max())
        assert scale > 0, key
        assert float((found[key] - right).abs().max()) < 1e-4 * scale, key


def trained(request: TrainRequest, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Step events of a run whose learning rate, if not changed, is too small to move a weight."""
    values = {**request.to_json(), "output": str(folder), "learning_rate": 1e-30, **changes}
    events: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    train(TrainRequest.from_json(values), lambda event: events.append(dict(event)))
    torch.set_num_threads(before)
    return [event for event in events if event["event"] == "step"]


def test_a_window_that_is_not_full_counts_by_its_own_pairs(made, tmp_path):
    # Five samples, each a pack of its own: a window of four, and one that is left.
    lone = trained(made.request, tmp_path / "lone", tokens_per_pack=8, tokens_per_step=8, epochs=1)
    left = trained(made.request, tmp_path / "left", tokens_per_pack=8, tokens_per_step=32, epochs=1)
    assert len(lone) == 5
    assert len(left) == 2
    [alone] = [event for event in lone if event["tokens"] == left[1]["tokens"]]
    assert left[1]["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-5)
    assert left[1]["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert sum(event["weight"] for event in left) == pytest.approx(31 * 2.44)


def test_steps_are_rounded_up_and_the_rate_ends_at_the_last(made, tmp_path):
    steps = trained(
        made.request,
        tmp_path,
        tokens_per_pack=8,
        tokens_per_step=32,  # five packs: two steps an epoch
        epochs=3,
        schedule="linear",
        learning_rate=0.01,
        warmup_share=1 / 6,
        final_learning_rate_share=0.1,
    )
    rates = [event["learning_rate"] for event in steps]
    assert rates == pytest.approx([0.01, 0.0082, 0.0064, 0.0046, 0.0028, 0.001])
    assert rates[-1] == 0.01 * 0.1
    assert [event["epoch"] for event in steps] == [0, 0, 1, 1, 2, 2]
    per_epoch = [sum(e["tokens"] for e in steps if e["epoch"] == epoch) for epoch in range(3)]
    assert per_epoch == [8 * 5 + 31] * 3  # every sample, in every epoch


def test_a_run_by_the_front_takes_all_steps_and_ends_its_schedule(exported_run):  # noqa: F811
    steps = exported_run.events("step")
    [index] = (exported_run.folder / "extract").glob("states-*.json")
    entries = [e for e in json.loads(index.read_text())["entries"] if e["split"] == "train"]
    tokens = sum(entry["length"] for entry in entries)
    for epoch in range(4):  # packs of 512 tokens, two a step
        mine = [event for event in steps if event["epoch"] == epoch]
        assert sum(event["tokens"] for event in mine) == tokens
        assert len(mine) >= math.ceil(tokens / 1024)
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["learning_rate"] == 0.01 * 0.1
    assert all(event["learning_rate"] > 0.01 * 0.1 for event in steps[:-1])
