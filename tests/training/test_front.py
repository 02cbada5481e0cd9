"""Training as its user meets it: what is refused before the wipe, what stops it, what is said."""

import pytest

from pipeline.slate.files import read_json
from pipeline.slate.manifest import Manifest
from tests.field_reports.drafts_fixtures import copied_run, exported_run  # noqa: F401


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("train.learning_rate=0", "train.learning_rate is 0"),
        ("train.learning_rate=1", "train.learning_rate is 1"),
        ("train.learning_rate=nan", "train.learning_rate is"),
        ("train.epochs=0", "train.epochs is 0"),
        ("train.betas=[0.9,1.0]", "betas is (0.9, 1.0)"),
        ("train.seed=-1", "seed is -1"),
        ("draft.head_dim=15", "head_dim = 15"),
        ("draft.kv_heads=3", "4 heads and 3 key/value heads"),
    ],
)
def test_an_impossible_value_is_refused_before_the_wipe(exported_run, value, named):  # noqa: F811
    assert named in exported_run.refused("train", "--set", value)


def test_a_run_without_any_learning_rate_is_refused_before_the_wipe(exported_run):  # noqa: F811
    values = ("train.epochs=1", "train.tokens_per_step=4096", "train.final_learning_rate_share=0")
    error = exported_run.refused("train", *(part for v in values for part in ("--set", v)))
    assert "one step in all" in error
    assert "raise final_learning_rate_share" in error


def test_answers_that_no_row_is_asked_for_are_refused_before_the_wipe(copied_run):  # noqa: F811
    def only_the_first_two(mask, _entry):
        mask[:] = False
        mask[:2] = True

    copied_run.change_states("supervised", only_the_first_two)
    error = copied_run.refused("train")
    assert "none of 14 samples is in the training split and has a supervised token" in error


def test_taps_that_a_server_cannot_capture_are_refused_before_extraction(exported_run):  # noqa: F811
    error = exported_run.refused("extract", "--set", "extract.taps=[0,2,4]")
    assert "SGLang has no id for it there" in error
    assert "choose another first tap: extract.taps" in error


@pytest.mark.parametrize(
    ("name", "value", "split", "said"),
    [
        ("tap_1", float("nan"), "train", "step 1: loss nan in the pack of samples"),
        ("final", float("inf"), "held_out", "step 0: loss nan on held-out samples"),
    ],
)
def test_a_state_that_is_not_finite_stops_training_and_names_step_and_samples(
    copied_run,  # noqa: F811
    name,
    value,
    split,
    said,
):
    spoilt = []

    def spoil(rows, entry):
        if entry.split == split and not spoilt:
            spoilt.append(entry.id)
            rows[-2 if name == "final" else 1, 3] = value

    copied_run.change_states(name, spoil)
    done = copied_run.run("train")
    assert done.status == 1
    assert said in done.err
    assert spoilt[0] in done.err
    assert "make verify" in done.err
    assert not (copied_run.folder / "train" / "manifest.json").exists()
    assert list((copied_run.folder / "train").glob("checkpoints/*")) == []


def test_a_rate_far_too_high_and_ranks_without_packs_are_said(copied_run):  # noqa: F811
    values = ("train.learning_rate=0.99", "train.tokens_per_step=512", "train.ranks=2")
    more = [part for value in values for part in ("--set", value)]
    said = copied_run.good("train", *more, "--set", "train.epochs=2")
    assert "a step has 1 pack(s) for 2 ranks: 1 of them will only wait" in said
    losses = [event["loss"] for event in copied_run.events("evaluation")]
    assert losses[-1] > losses[0]
    assert f"the held-out loss rose from {losses[0]:.3f} to {losses[-1]:.3f}" in said
    assert all(event["updated"] for event in copied_run.events("step"))


def test_without_held_out_samples_it_trains_and_says_that_nothing_shows_it(copied_run):  # noqa: F811
    [path] = (copied_run.folder / "extract").glob("states-*.json")
    path.write_text(path.read_text().replace('"held_out"', '"train"'))
    copied_run.reseal("extract")
    said = copied_run.good("train", "--set", "train.epochs=1")
    assert "0 held out" in said
    assert "no held-out sample: nothing will show whether the drafter learns" in said
    assert copied_run.events("evaluation") == []
    assert copied_run.events("step")[0]["updated"]


def test_an_unfinished_training_is_finished_before_it_is_exported(copied_run):  # noqa: F811
    whole = Manifest.read(copied_run.folder / "train").digest
    (copied_run.folder / "train" / "manifest.json").unlink()
    last = copied_run.checkpoint
    last.rename(last.with_name(f".{last.name}.pruned"))  # as if killed before its last step
    assert "train: sealed in" in copied_run.good("export")
    assert Manifest.read(copied_run.folder / "train").digest == whole
    checkpoint = read_json(copied_run.folder / "export" / "manifest.json")["facts"]["checkpoint"]
    assert checkpoint == copied_run.checkpoint.name


def test_other_settings_do_not_continue_an_unfinished_training(copied_run):  # noqa: F811
    (copied_run.folder / "train" / "manifest.json").unlink()
    marks = copied_run.checkpoint / "state.json"
    before = marks.read_bytes()
    done = copied_run.run("train", "--resume", "--set", "train.step_decay=0.5")
    assert done.status == 1
    assert "step_decay: found 0.8, wanted 0.5" in done.err
    assert marks.read_bytes() == before


def test_a_training_on_other_states_is_not_exported(copied_run):  # noqa: F811
    """A whole, sealed training out of another run folder."""
    path = copied_run.folder / "train"
    manifest = Manifest.read(path)
    inputs = {**manifest.inputs, "extract": "0" * 64}
    Manifest(**{**vars(manifest), "inputs": inputs}).write(path)
    error = copied_run.refused("export")
    assert "the sealed output of train was made from something else" in error
    assert "inputs.extract" in error
