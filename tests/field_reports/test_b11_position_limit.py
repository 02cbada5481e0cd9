"""B11: the exported position limit is the target's, whatever length was trained on."""

import json

import pytest

from pipeline.settings.model import DraftSettings
from pipeline.slate.files import read_json
from pipeline.stages.export import longest_trained
from pipeline.stages.train import drafter_config
from pipeline.store.index import Entry
from pipeline.target.facts import read_facts
from tests.field_reports.drafts_fixtures import copied_run, exported_run  # noqa: F401


def longest(run, split: str) -> int:
    [path] = (run.folder / "extract").glob("states-*.json")
    entries = json.loads(path.read_text())["entries"]
    return max(entry["length"] for entry in entries if entry["split"] == split)


def test_a_drafter_trained_to_128_for_a_target_of_8192_is_exported_with_8192(exported_run):  # noqa: F811
    values = read_json(exported_run.folder / "export" / "config.json")
    assert values["max_position_embeddings"] == 8192
    assert values["cleanslate"]["drafter"]["max_position_embeddings"] == 8192


def test_the_user_is_told_to_which_length_it_was_trained(exported_run):  # noqa: F811
    trained = longest(exported_run, "train")
    assert 40 < trained <= 128
    wanted = (
        f"the drafter was trained on samples of up to {trained} tokens; its position limit is 8192 "
        f"(the target's is 8192), and acceptance beyond {trained} is unproven"
    )
    assert wanted in (exported_run.root / "said.txt").read_text()


def test_a_held_out_sample_does_not_count_as_trained_length():
    sizes = [("train", 66), ("held_out", 128), ("train", 40)]
    entries = [Entry(f"s-{n}", split, "x", 0, n, 1, "") for split, n in sizes]
    assert longest_trained(entries) == 66


@pytest.mark.parametrize("limit", [128, 8191])
def test_a_limit_below_the_targets_is_refused_before_the_wipe(exported_run, limit):  # noqa: F811
    error = exported_run.refused("train", "--set", f"draft.max_position_embeddings={limit}")
    assert f"draft.max_position_embeddings is {limit}" in error
    assert "at least the target's 8192 positions" in error


@pytest.mark.parametrize(("asked", "limit"), [(0, 8192), (8192, 8192), (16384, 16384)])
def test_a_limit_of_the_targets_or_higher_is_what_the_user_asked_for(exported_run, asked, limit):  # noqa: F811
    facts = read_facts(exported_run.root / "target")
    draft = DraftSettings(vocabulary_size=64, max_position_embeddings=asked)
    assert drafter_config(draft, facts, taps=(1, 3, 4)).max_position_embeddings == limit


def test_a_checkpoint_with_a_lower_limit_is_not_exported(copied_run):  # noqa: F811
    copied_run.change_checkpoint(state=lambda s: s["drafter"].update(max_position_embeddings=128))
    error = copied_run.refused("export")
    assert "drafter position limit 128" in error
    assert "at least the target's 8192" in error
