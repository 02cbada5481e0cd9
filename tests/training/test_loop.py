import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.draft.config import DrafterConfig
from pipeline.draft.export import export_drafter, load_exported
from pipeline.draft.vocabulary import build_vocabulary
from pipeline.training.checkpoint import newest_complete, read_checkpoint
from pipeline.training.errors import (
    CheckpointError,
    NonFinite,
    NothingToTrain,
    RequestError,
    ResumeRefused,
)
from pipeline.training.loop import train
from pipeline.training.request import TrainRequest


def run(request: TrainRequest) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    train(request, lambda event: events.append(json.loads(json.dumps(event))))
    return events


def lines(request: TrainRequest) -> list[dict[str, Any]]:
    text = (request.output / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def untimed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    times = ("seconds", "tokens_per_second")
    return [{k: v for k, v in event.items() if k not in times} for event in events]


def names(request: TrainRequest) -> list[str]:
    return sorted(p.name for p in (request.output / "checkpoints").iterdir())


def start_worker(request: TrainRequest, file: Path) -> subprocess.Popen[str]:
    file.write_text(json.dumps(request.to_json()))
    command = [sys.executable, "-m", "pipeline.training.worker", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_run_says_what_it_does_and_leaves_its_last_step(ask):
    request = ask(checkpoint_every_steps=2, keep_checkpoints=2)
    events = run(request)
    plan, last = events[0], events[-1]
    total = plan["steps"]
    assert (plan["samples"], plan["held_out_samples"], plan["resumed_at"]) == (8, 2, 0)
    assert sum(plan["steps_per_epoch"]) == total
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, total + 1))
    evaluations = [event["step"] for event in events if event["event"] == "evaluation"]
    assert evaluations == [0, plan["steps_per_epoch"][0], total]
    assert names(request)[-1] == f"step-{total:08d}"
    assert len(names(request)) == 2
    assert last["event"] == "done"
    assert last["loss"] == steps[-1]["loss"]
    assert last["tokens"] == 2 * plan["tokens"]
    assert last["held_out"]["acceptance_length"] >= 1
    assert Path(last["checkpoint"]).name == names(request)[-1]
    assert lines(request) == [e for e in events if e["event"] in ("step", "evaluation")]


def test_the_learning_rate_ends_exactly_at_the_last_step(ask):
    steps = [event for event in run(ask()) if event["event"] == "step"]
    assert steps[-1]["learning_rate"] == 1e-2 * 0.1


def test_training_learns(ask):
    events = run(ask(epochs=15, warmup_share=0.0))
    steps = [event for event in events if event["event"] == "step"]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]


def test_held_out_samples_are_never_trained_on(ask, sample):
    clean = [sample(12, (6, 7, 8, 9)) for _ in range(4)]
    poisoned = sample(14, (6, 7, 8), split="held_out", poison=True)
    with pytest.raises(NonFinite, match="step 0: loss nan on held-out samples c-4"):
        run(ask([*clean, poisoned]))
    others = ask([*clean, sample(14, (), split="held_out", poison=True)])
    assert run(others)[0]["samples"] == 4  # unsupervised and held out: read by nobody


def test_a_run_without_held_out_samples_says_so(ask, sample):
    events = run(ask([sample(12, (6, 7, 8, 9))] * 3))
    assert events[-1]["held_out"] is None


def test_a_dataset_without_supervised_tokens_is_refused(ask, sample):
    with pytest.raises(NothingToTrain, match="supervised"):
        run(ask([sample(12, ())]))


def test_supervised_tokens_that_no_row_is_asked_for_are_nothing_to_train(ask, sample):
    held_out = sample(12, (6, 7), split="held_out")
    with pytest.raises(NothingToTrain, match="none of 2 samples"):
        run(ask([sample(12, (0, 1)), held_out]))


def test_a_step_that_asks_for_nothing_changes_nothing(ask, sample):
    samples = [sample(40, (0, 1)), sample(40, (6, 7))]  # each is a pack, and a step
    request = ask(samples, tokens_per_step=40, epochs=1)
    updated = [event["updated"] for event in run(request) if event["event"] == "step"]
    assert sorted(updated) == [False, True]
    trained = read_checkpoint(request.output / "checkpoints" / names(request)[-1])
    assert int(trained.optimizer()["updates"]) == 1


@pytest.mark.parametrize("when", [1, 3])
def test_a_killed_run_goes_on_bit_for_bit(ask, tmp_path, when):
    whole = ask(output=tmp_path / "whole", checkpoint_every_steps=2, epochs=3)
    run(whole)
    broken = replace(whole, output=tmp_path / "broken")
    child = start_worker(broken, tmp_path / "request.json")
    assert child.stdout is not None
    for line in child.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["step"] > when:
            break
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert len(lines(broken)) > 0
    events = run(replace(broken, resume=True))
    assert events[0]["resumed_at"] in (0, *range(2, 20, 2))
    assert untimed(lines(broken)) == untimed(lines(whole))
    for name in ("model.safetensors", "optimizer.safetensors"):
        last = names(whole)[-1]
        pair = [r.output / "checkpoints" / last / name for r in (whole, broken)]
        assert pair[0].read_bytes() == pair[1].read_bytes()


def test_resuming_a_broken_newest_uses_the_one_before_and_gives_the_same_end(ask):
    request = ask(checkpoint_every_steps=2)
    first = run(request)
    cut = request.output / "checkpoints" / names(request)[-1] / "model.safetensors"
    whole = cut.read_bytes()
    cut.write_bytes(whole[:-8])
    again = run(replace(request, resume=True))
    assert again[0]["resumed_at"] == 2
    assert again[0]["passed_over"][0][0] == names(request)[-1]
    assert "model.safetensors has" in again[0]["passed_over"][0][1]
    assert again[-1] == first[-1]
    assert cut.read_bytes() == whole


def test_resuming_a_finished_run_is_done_at_once(ask):
    request = ask()
    first = run(request)
    again = run(replace(request, resume=True))
    assert [event["event"] for event in again] == ["plan", "done"]
    assert again[-1] == first[-1]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"learning_rate": 0.02}, "learning_rate"), ({"epochs": 3}, "epochs was 2, is 3")],
)
def test_other_settings_do_not_resume(ask, change, named):
    run(ask())
    with pytest.raises(ResumeRefused, match=named):
        run(ask(resume=True, **change))


def test_other_data_does_not_resume(ask, sample):
    run(ask())
    with pytest.raises(ResumeRefused, match="dataset was"):
        run(ask([sample(12, (6, 7, 8))] * 3, resume=True))


def test_nothing_complete_to_resume_from_is_an_error(ask):
    request = ask()
    run(request)
    (request.output / "checkpoints" / names(request)[0] / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run(replace(request, resume=True))


def test_a_new_run_does_not_write_among_old_checkpoints(ask):
    request = ask()
    run(request)
    with pytest.raises(CheckpointError, match="earlier run"):
        run(request)


def test_states_of_another_target_are_refused(ask):
    request = ask()
    config = json.loads((request.target / "config.json").read_text())
    (request.target / "config.json").write_text(json.dumps({**config, "note": "changed"}))
    with pytest.raises(RequestError, match="fingerprint"):
        run(request)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"taps": [0, 1, 2]}, "taps"),
        ({"draft_vocabulary_size": 12}, "draft vocabulary"),
        ({"target_vocabulary_size": 50}, "embedding"),
        ({"hidden_size": 32, "target_hidden_size": 32}, "hidden size is 16"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_training(ask, change, named):
    request = ask()
    with pytest.raises(RequestError, match=named):
        run(replace(request, drafter={**request.drafter, **change}))


def exported(request: TrainRequest, folder: Path, facts) -> Path:
    """Trains as asked and exports the last checkpoint."""
    checkpoint = newest_complete(Path(run(request)[-1]["checkpoint"]).parent)[0]
    model, vocabulary = checkpoint.model()
    config = DrafterConfig.from_json(checkpoint.drafter)
    folder.mkdir()
    export_drafter(folder, model, vocabulary, config, target=facts, taps=config.taps)
    return folder


def test_a_warm_start_keeps_the_map_and_starts_where_the_old_run_ended(ask, tmp_path, facts):
    first = ask(output=tmp_path / "first", epochs=4)
    folder = exported(first, tmp_path / "drafter", facts)
    old = [line for line in lines(first) if line["event"] == "evaluation"][-1]
    second = replace(first, output=tmp_path / "second", warm_start=folder, draft_vocabulary=None)
    new = next(event for event in run(second) if event["event"] == "evaluation")
    assert new["step"] == 0
    assert new["accuracy"] == pytest.approx(old["accuracy"], abs=0.02)  # the export is bfloat16
    assert new["loss"] == pytest.approx(old["loss"], rel=0.02)
    kept = read_checkpoint(Path(second.output / "checkpoints" / names(second)[-1])).model()[1]
    assert kept.same_as(load_exported(folder)[1])


def test_a_warm_start_with_another_map_is_refused(ask, tmp_path, facts):
    first = ask(output=tmp_path / "first")
    folder = exported(first, tmp_path / "drafter", facts)
    other = tmp_path / "other.safetensors"
    build_vocabulary(torch.arange(48), 24).save(other)
    second = replace(first, output=tmp_path / "second", warm_start=folder, draft_vocabulary=other)
    with pytest.raises(RequestError, match="maps other tokens"):
        run(second)


def test_a_warm_start_of_another_shape_is_refused(ask, tmp_path, facts):
    first = ask(output=tmp_path / "first")
    folder = exported(first, tmp_path / "drafter", facts)
    second = replace(
        first,
        output=tmp_path / "second",
        warm_start=folder,
        drafter={**first.drafter, "intermediate_size": 64},
    )
    with pytest.raises(RequestError, match="intermediate_size 32 against 64"):
        run(second)
