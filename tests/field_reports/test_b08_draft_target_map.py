"""B08: the map from draft to target ids holds offsets, lies in the weights, and is never absent."""

import pytest
import torch
from safetensors.torch import load_file

from pipeline.draft.export import export_drafter, load_exported
from pipeline.draft.vocabulary import build_vocabulary
from pipeline.target.facts import TargetFacts
from tests.draft.make import make_config, make_drafter
from tests.field_reports.drafts_fixtures import D, V, copied_run, exported_run  # noqa: F401

TARGET = TargetFacts(
    hidden_size=12, layers=6, vocabulary_size=10, heads=4, kv_heads=2, head_dim=3,
    intermediate_size=20, rms_norm_eps=1e-5, rope_theta=100.0, rope_scaling=None,
    max_position_embeddings=64, architecture="LlamaForCausalLM", model_type="llama",
    dtype="bfloat16", tied=False, eos_token_ids=(2,),
)  # fmt: skip


def export(folder, *, kept, size):
    """A drafter whose head answers the unit vector of draft id j with j."""
    counts = torch.zeros(10, dtype=torch.int64)
    counts[kept] = 1
    config = make_config(target_vocabulary_size=10, draft_vocabulary_size=size)
    state = make_drafter(config).state_dict()
    state["lm_head.weight"] = torch.eye(size, 12)
    state["norm.weight"] = torch.ones(12)
    vocabulary = build_vocabulary(counts, size)
    export_drafter(folder, state, vocabulary, config, target=TARGET, taps=config.taps)
    return load_file(folder / "model.safetensors")


def test_kept_ids_1_4_7_of_10_give_offsets_1_3_5_and_flags_exactly_there(tmp_path):
    tensors = export(tmp_path, kept=[1, 4, 7], size=3)
    assert tensors["d2t"].tolist() == [1, 3, 5]
    assert tensors["d2t"].dtype == torch.int64
    F, T = False, True
    assert tensors["t2d"].tolist() == [F, T, F, F, T, F, F, T, F, F]
    assert tensors["t2d"].dtype == torch.bool


def test_the_drafts_argmax_through_the_exported_map_is_the_intended_target_id(tmp_path):
    tensors = export(tmp_path, kept=[1, 4, 7], size=3)
    model, _, _ = load_exported(tmp_path)
    for draft, target in enumerate([1, 4, 7]):
        hidden = torch.eye(12)[draft].bfloat16()
        answer = int(model.logits(hidden).argmax())
        assert answer + int(tensors["d2t"][answer]) == target  # as both servers do


def test_a_full_vocabulary_is_exported_as_the_identity(tmp_path):
    tensors = export(tmp_path, kept=[1, 4, 7], size=10)
    assert tensors["d2t"].tolist() == [0] * 10
    assert tensors["t2d"].tolist() == [True] * 10


def test_an_exported_run_holds_a_rising_map_below_the_targets_vocabulary(exported_run):  # noqa: F811
    tensors = exported_run.exported()
    targets = [draft + offset for draft, offset in enumerate(tensors["d2t"].tolist())]
    assert len(targets) == D == 64
    assert len(tensors["t2d"]) == V == 512
    assert targets == sorted(set(targets))
    assert targets[-1] < 512
    assert [i for i, kept in enumerate(tensors["t2d"].tolist()) if kept] == targets
    assert targets != list(range(64))  # else absolute ids and offsets could not be told apart


def lose(tensors):
    del tensors["d2t"], tensors["t2d"]


def make_absolute(tensors):
    tensors["d2t"] = tensors["d2t"] + torch.arange(D)


def fill_with_a_range(tensors):
    tensors["d2t"] = torch.arange(D)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lose, "without ['d2t', 't2d']"),
        (make_absolute, "wanted: ids in [0, 512)"),
        (fill_with_a_range, "d2t and t2d name different target tokens"),
    ],
)
def test_a_checkpoint_without_its_map_or_with_another_kind_of_map_is_not_exported(
    copied_run,  # noqa: F811
    change,
    named,
):
    copied_run.change_checkpoint(change)
    error = copied_run.refused("export")
    assert "step-" in error
    assert named in error


def test_a_draft_vocabulary_larger_than_the_targets_is_refused_before_the_wipe(exported_run):  # noqa: F811
    error = exported_run.refused("prepare", "--set", "draft.vocabulary_size=513")
    assert "draft.vocabulary_size is 513" in error
    assert "at most the target's 512" in error
