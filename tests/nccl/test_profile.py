"""What a stage takes from the file of winners."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.nccl.errors import NcclError
from pipeline.nccl.plan import Grid
from pipeline.nccl.profile import environment_for
from pipeline.nccl.record import Record
from tests.nccl.make import row, twice

LL = {"NCCL_PROTO": "LL"}
ON = {"host": "h", "backend": "nccl", "gpus": ["G"] * 8, "driver": "1", "torch": "2"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """LL won for extraction on eight GPUs, nothing worked for training on four."""
    gpus = {"extraction": (0, 1, 2, 3, 4, 5, 6, 7), "training": (0, 1, 2, 3)}
    rows = [*twice({}, 1.0, 1.0), *twice(LL, 0.5, 0.5), row({}, status="hung", use="training")]
    file = tmp_path / "nccl.json"
    Record(ON, gpus, "2.29.7", rows).write(file, Grid())
    return file


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_stage_gets_the_winner_of_its_use(path: Path) -> None:
    found = environment_for(path, "extraction", explicit={}, gpus=8)
    assert found == {"NCCL_PROTO": "LL", "NCCL_NVLS_ENABLE": "0"}


def test_what_settings_say_wins_name_by_name(path: Path) -> None:
    explicit = {"NCCL_PROTO": "Simple", "NCCL_DEBUG": "INFO"}
    found = environment_for(path, "extraction", explicit=explicit, gpus=8)
    assert found == {**explicit, "NCCL_NVLS_ENABLE": "0"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_stage_that_sends_nothing_does_not_read_the_file(tmp_path: Path, gpus: int) -> None:
    absent = tmp_path / "absent.json"
    assert environment_for(absent, "training", explicit=LL, gpus=gpus) == LL


def test_without_a_file_settings_are_all_there_is() -> None:
    assert environment_for(None, "extraction", explicit=LL, gpus=8) == LL


def test_another_number_of_gpus_was_not_measured(path: Path) -> None:
    with pytest.raises(NcclError, match="extraction was measured on 8 GPUs, this stage has 4"):
        environment_for(path, "extraction", explicit={}, gpus=4)


def test_what_the_playbook_wrote_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "nccl.json"
    path.write_text(json.dumps({"extraction": LL, "training": {}}))
    assert environment_for(path, "extraction", explicit={}, gpus=8) == LL
    assert environment_for(path, "training", explicit={}, gpus=4) == {}


@pytest.mark.parametrize("training", [None, {"NCCL_BUFFSIZE": 1}])
def test_what_is_no_map_of_names_to_text_is_refused(tmp_path: Path, training: Any) -> None:
    path = tmp_path / "nccl.json"
    path.write_text(json.dumps({"extraction": LL, "training": training}))
    with pytest.raises(NcclError, match="not a file of make tune-nccl"):
        environment_for(path, "extraction", explicit={}, gpus=8)


def test_a_use_for_which_nothing_worked_is_refused(path: Path) -> None:
    with pytest.raises(NcclError, match="nothing worked for training"):
        environment_for(path, "training", explicit={}, gpus=4)


@pytest.mark.parametrize(
    ("change", "found"), [({"simulated": True}, "SIMULATED"), ({"format": 2}, "not a file of make")]
)
def test_what_is_no_measurement_of_this_version_is_refused(
    path: Path, change: dict[str, Any], found: str
) -> None:
    changed(path, **change)
    with pytest.raises(NcclError, match=found):
        environment_for(path, "extraction", explicit={}, gpus=8)


@pytest.mark.parametrize("text", [None, "{"], ids=["absent", "cut"])
def test_a_file_that_cannot_be_read_is_refused_with_the_three_ways_out(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "nccl.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(NcclError, match=f"run.nccl cannot be read: {path}") as raised:
        environment_for(path, "training", explicit=LL, gpus=4)
    assert "the playbook or make tune-nccl" in raised.value.wanted
    for way in ("ansible-playbook site.yml --tags nccl", "make tune-nccl OUT=", "run.nccl=null"):
        assert way in raised.value.next_step


def test_a_file_that_is_cut_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(NcclError, match="nccl"):
        environment_for(path, "extraction", explicit={}, gpus=8)
