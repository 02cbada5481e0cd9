"""B16: one meaning of a layer number, from the capture to what the servers read."""

import json
from pathlib import Path

import pytest
import yaml

from pipeline.slate.files import read_json
from pipeline.store.reader import StateDataset

from .states_fixtures import Job, cli, fingerprinted, random_target, tiny_target, toy_checkpoint

__all__ = ["fingerprinted", "tiny_target"]


def test_each_tap_is_the_stream_entering_the_layer_that_it_names(fingerprinted: Job) -> None:
    dataset = StateDataset.open(fingerprinted.folder / "extract")
    assert len(dataset.entries) == 6
    for entry in dataset.entries:
        low, mid, high = (tap[:, 0].tolist() for tap in dataset.read(entry).taps)
        assert low == [1.0] * entry.length  # layer 0 alone lies before layer 1
        assert mid == [111.0] * entry.length
        assert high == [111104.0] * entry.length  # 111111 to the eight bits of bfloat16


def test_dataset_manifest_and_drafter_name_the_same_layers_in_one_convention(
    fingerprinted: Job,
) -> None:
    told = read_json(fingerprinted.folder / "extract" / "dataset.json")
    assert told["taps"] == [1, 3, 6]
    assert told["tap_convention"] == (
        "tap k is the residual stream entering decoder layer k, counted from 0"
    )
    for stage in ("extract", "train", "export"):
        manifest = read_json(fingerprinted.folder / stage / "manifest.json")
        assert manifest["facts"]["taps"] == [1, 3, 6]


def test_each_server_is_told_the_same_layers_in_its_own_numbering(fingerprinted: Job) -> None:
    config = read_json(fingerprinted.folder / "export" / "config.json")
    # vLLM counts as we do; SGLang's Llama takes an id for the output of that layer.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert config["num_aux_hidden_states"] == 3


@pytest.mark.parametrize(
    ("taps", "found", "wanted"),
    [
        ("[1,4,8]", "extract.taps names layer 8, the target has 8", "layers 0 to 7"),
        ("[1,4,70]", "extract.taps names layer 70, the target has 8", "layers 0 to 7"),
        ("[-1,4,6]", "extract.taps.0", "greater than or equal to 0"),
        ("[3,1,6]", "taps must rise without repeats, found [3, 1, 6]", "extract"),
        ("[1,1,6]", "taps must rise without repeats, found [1, 1, 6]", "extract"),
        ("[1,6]", "extract.taps", "at least 3 items"),
        ("[1,2,3,6]", "extract.taps", "at most 3 items"),
        ("[1.5,2,3]", "extract.taps.0", "valid integer"),
        ("[0,4,6]", "taps [0, 4, 6] for target class LlamaForCausalLM", "a first tap other than 0"),
    ],
)
def test_layers_that_cannot_be_are_refused_before_anything_is_wiped(
    fingerprinted: Job, taps: str, found: str, wanted: str
) -> None:
    error = fingerprinted.refused("extract", f"extract.taps={taps}")
    assert found in error
    assert wanted in error
    assert "extract.taps" in error
    assert (fingerprinted.folder / "extract" / "manifest.json").is_file()


def test_a_first_layer_that_sglang_cannot_be_told_is_refused_before_hours_of_capture(
    tiny_target: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_target / "config.json").read_text())
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"]}
    job = Job(tmp_path, toy_checkpoint(tmp_path / "t", like=tiny_target, config=config | kimi))
    error = job.refused("extract", "extract.taps=[1,3,6]")
    assert "taps [1, 3, 6] for target class KimiK25ForConditionalGeneration" in error
    assert not job.begun("extract")


def test_a_class_whose_numbering_is_not_known_is_refused_before_hours_of_capture(
    tiny_target: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_target / "config.json").read_text())
    other = {"architectures": ["NewForCausalLM"]}
    job = Job(tmp_path, toy_checkpoint(tmp_path / "t", like=tiny_target, config=config | other))
    error = job.refused("extract")
    assert "target class 'NewForCausalLM'" in error
    assert not job.begun("extract")


def test_there_are_no_default_taps_that_could_collapse_on_a_shallow_target(
    tmp_path: Path,
) -> None:
    profile = {
        "target": {"source": {"kind": "random", "layers": 4}},
        "prepare": {},
        "extract": {},
        "draft": {"vocabulary_size": 100},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(profile))
    done = cli("extract", "--profile", str(tmp_path / "job.yaml"))
    assert done.status == 1
    assert "extract.taps" in done.error
    assert "wanted:" in done.error


def test_three_layers_of_a_target_of_four_give_three_taps(tmp_path: Path) -> None:
    job = Job(tmp_path, random_target(tmp_path / "t", layers=4), taps=[1, 2, 3])
    job.good("extract")
    assert StateDataset.open(job.folder / "extract").taps == (1, 2, 3)
    error = job.refused("extract", "extract.taps=[1,3,4]")
    assert "names layer 4, the target has 4" in error
