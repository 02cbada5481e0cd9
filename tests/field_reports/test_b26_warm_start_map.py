"""B26: a warm start keeps the map that the drafter's head was trained with."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.draft.config import DrafterConfig
from pipeline.draft.export import export_drafter, load_exported
from pipeline.slate.files import read_json, write_json
from pipeline.store.reader import StateDataset
from pipeline.target.facts import read_facts
from pipeline.training.errors import RequestError
from pipeline.training.material import start_and_map
from pipeline.training.request import TrainRequest
from tests.draft.reference import dense_loss
from tests.field_reports.drafts_fixtures import (  # noqa: F401
    Tiny,
    copied_run,
    copy_of,
    exported_run,
)


@pytest.fixture(scope="module")
def other_text(exported_run, tmp_path_factory) -> tuple[Tiny, str]:  # noqa: F811
    """Trained on text B from the drafter of text A, and what that said."""
    run = copy_of(exported_run, tmp_path_factory.mktemp("other") / "b", text="b")
    warm = exported_run.folder / "export"
    return run, run.good("train", "--set", f"train.warm_start={warm}")


def test_the_checkpoints_map_is_that_of_the_first_text(exported_run, other_text):  # noqa: F811
    run, said = other_text
    kept = exported_run.exported()
    of_b = load_file(run.folder / "prepare" / "draft_vocabulary.safetensors")
    assert of_b["d2t"].tolist() != kept["d2t"].tolist()  # the texts have other frequent tokens
    trained = load_file(run.checkpoint / "model.safetensors")
    for name in ("d2t", "t2d"):
        assert trained[name].tolist() == kept[name].tolist()
    missing = sum(b and not a for a, b in zip(kept["t2d"], of_b["t2d"], strict=True))
    assert missing > 10
    assert f"whose draft vocabulary is kept; {missing} of the 64 tokens that make prepare" in said


def test_before_the_first_step_it_scores_on_new_text_as_the_old_drafter_does(
    exported_run,  # noqa: F811
    other_text,
):
    """The old export on text B's held-out samples by the formulas, dense, in target ids."""
    run, _ = other_text
    tensors = {n: t.double() for n, t in exported_run.exported().items() if n not in ("d2t", "t2d")}
    targets = exported_run.exported()["d2t"] + torch.arange(64)
    target = load_file(run.root / "target" / "model.safetensors")
    config = load_exported(exported_run.folder / "export")[2]
    dataset = StateDataset.open(run.folder / "extract")
    sums = {name: torch.zeros(3) for name in ("count", "correct", "outside", "loss")}
    for entry in dataset.entries:
        if entry.split == "train":
            continue
        states = dataset.read(entry)
        _, _, found = dense_loss(
            tensors,
            config,
            ids=states.input_ids.long(),
            taps=torch.cat(states.taps, -1).double(),
            final=states.final.double(),
            supervised=states.supervised,
            document=torch.zeros(entry.length),
            position=torch.arange(entry.length),
            embedding=target["model.embed_tokens.weight"].double(),
            teacher_head=target["lm_head.weight"].double()[targets],
            target_ids=targets,
            steps=3,
            decay=0.8,
        )
        for name, total in sums.items():
            total += torch.tensor(found[name])
    before = run.events("evaluation")[0]
    assert before["step"] == 0
    assert before["count"] == sums["count"].tolist()
    assert before["outside"] == pytest.approx((sums["outside"] / sums["count"]).tolist())
    assert before["accuracy"] == pytest.approx((sums["correct"] / sums["count"]).tolist())
    assert before["loss_by_step"] == pytest.approx((sums["loss"] / sums["count"]).tolist(), 1e-3)


def with_another_origin(folder: Path, copy: Path, **changes: str) -> Path:
    shutil.copytree(folder, copy)
    values = read_json(copy / "config.json")
    values["cleanslate"]["origin"].update(changes)
    write_json(copy / "config.json", values)
    return copy


def test_on_the_old_states_it_starts_where_the_old_run_ended(copied_run, tmp_path):  # noqa: F811
    old = copied_run.events("evaluation")[-1]
    warm = with_another_origin(copied_run.folder / "export", tmp_path / "warm", target="another")
    more = ("--set", "train.epochs=1", "--set", f"train.warm_start={warm}")
    said = copied_run.good("train", *more)
    new = copied_run.events("evaluation")[0]
    assert new["step"] == 0
    assert old["accuracy"][0] > 0.05  # there is something to lose
    assert new["accuracy"] == pytest.approx(old["accuracy"], abs=0.02)  # the export is bfloat16
    assert new["outside"] == old["outside"]
    assert new["loss"] == pytest.approx(old["loss"], rel=0.005)
    assert "0 of the 64 tokens that make prepare chose are not in it" in said
    assert "was trained for another target than these states are of" in said


def test_a_drafter_for_other_tokens_is_refused_before_the_wipe(copied_run, tmp_path):  # noqa: F811
    warm = with_another_origin(copied_run.folder / "export", tmp_path / "warm", tokens="others")
    error = copied_run.refused("train", "--set", f"train.warm_start={warm}")
    assert "was trained for a target with other tokens" in error


def test_another_map_given_by_the_user_is_refused(exported_run, other_text, tmp_path):  # noqa: F811
    warm = exported_run.folder / "export"
    config: DrafterConfig = load_exported(warm)[2]
    request = TrainRequest(
        dataset=exported_run.folder / "extract",
        target=exported_run.root / "target",
        output=tmp_path,
        drafter=config.to_json(),
        warm_start=warm,
        draft_vocabulary=other_text[0].folder / "prepare" / "draft_vocabulary.safetensors",
    )
    with pytest.raises(RequestError, match="maps other tokens than the drafter"):
        start_and_map(request, config)


def test_a_drafter_of_other_taps_is_refused_before_the_wipe(exported_run, tmp_path):  # noqa: F811
    model, vocabulary, config = load_exported(exported_run.folder / "export")
    taps = (1, 2, 4)
    export_drafter(
        tmp_path, model.state_dict(), vocabulary, replace(config, taps=taps),
        target=read_facts(exported_run.root / "target"), taps=taps,
    )  # fmt: skip
    error = exported_run.refused("train", "--set", f"train.warm_start={tmp_path}")
    assert "taps [1, 2, 4] against [1, 3, 4]" in error


def test_a_drafter_of_another_shape_is_refused_before_the_wipe(exported_run):  # noqa: F811
    warm = f"train.warm_start={exported_run.folder / 'export'}"
    more = ("--set", "draft.intermediate_size=96", "--set", warm)
    assert "intermediate_size 128 against 96" in exported_run.refused("train", *more)


@pytest.mark.parametrize(
    ("left", "named"),
    [
        ((), "model.safetensors does not exist"),
        (("model.safetensors",), "config.json"),
        (("config.json",), "model.safetensors does not exist"),
    ],
)
def test_a_folder_that_is_no_whole_export_is_refused_by_name(exported_run, tmp_path, left, named):  # noqa: F811
    for name in left:
        shutil.copy(exported_run.folder / "export" / name, tmp_path)
    error = exported_run.refused("train", "--set", f"train.warm_start={tmp_path}")
    assert named in error


def test_a_drafter_of_another_trainer_is_refused(exported_run, tmp_path):  # noqa: F811
    shutil.copy(exported_run.folder / "export" / "model.safetensors", tmp_path)
    write_json(tmp_path / "config.json", {"architectures": ["LlamaForCausalLMEagle3"]})
    error = exported_run.refused("train", "--set", f"train.warm_start={tmp_path}")
    assert "without a whole 'cleanslate' block" in error
