import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.training.checkpoint import (
    Position,
    newest_complete,
    prune,
    read_checkpoint,
    sweep,
    write_checkpoint,
)
from pipeline.training.errors import CheckpointError, ResumeRefused

VOCABULARY = DraftVocabulary(
    torch.tensor([1, 3, 5]),
    torch.tensor([False, True, False, False, True, False, False, True, False, False]),
)
DATA, SETTINGS = {"dataset": "abc"}, {"epochs": 3, "decay": 0.8}


def save(folder: Path, step: int, *, numbers: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_checkpoint(
        folder,
        position=Position(step, 0, step),
        seed=7,
        model={"fc.weight": torch.full((numbers,), float(step))},
        optimizer={"fc.weight.exp_avg": torch.ones(numbers), "updates": torch.tensor(step)},
        vocabulary=VOCABULARY,
        data=DATA,
        settings=SETTINGS,
        drafter={"hidden_size": 4},
        outcome={"tokens": 10 * step},
    )


def test_a_checkpoint_comes_back_whole(tmp_path: Path):
    found = read_checkpoint(save(tmp_path, 12))
    model, vocabulary = found.model()
    assert found.folder.name == "step-00000012"
    assert (found.position, found.seed) == (Position(12, 0, 12), 7)
    assert model["fc.weight"].tolist() == [12.0] * 4
    assert vocabulary.target_ids.tolist() == [1, 4, 7]
    assert int(found.optimizer()["updates"]) == 12
    assert found.outcome == {"tokens": 120}
    found.refuse_other(data=DATA, settings=SETTINGS)


def test_the_mask_convention_is_written_down(tmp_path: Path):
    state = json.loads((save(tmp_path, 1) / "state.json").read_text())
    assert state["supervised_by"].startswith("label: row t")


def cut_model(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def flip_bit(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_settings(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"epochs": 3', '"epochs": 4'))


BREAKS = {
    "cut weights": (cut_model, "model.safetensors has"),
    "flipped bit": (flip_bit, "optimizer.safetensors does not have its sha256"),
    "no optimizer": (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors: No"),
    "empty state": (lambda f: (f / "state.json").write_bytes(b""), "state.json"),
    "no state": (lambda f: (f / "state.json").unlink(), "state.json"),
    "state is a list": (lambda f: (f / "state.json").write_text("[]"), "state.json"),
    "changed settings": (other_settings, "settings in state.json"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_newest_is_passed_over_with_its_reason(tmp_path: Path, kind: str):
    save(tmp_path, 10)
    breaks, reason = BREAKS[kind]
    breaks(save(tmp_path, 20))
    found, passed_over = newest_complete(tmp_path)
    assert found is not None
    assert found.position.step == 10
    [(name, why)] = passed_over
    assert name == "step-00000020"
    assert reason in why


@pytest.mark.parametrize("kind", BREAKS)
def test_naming_a_broken_one_outright_is_an_error(tmp_path: Path, kind: str):
    path = save(tmp_path, 20)
    BREAKS[kind][0](path)
    with pytest.raises(CheckpointError, match="step-00000020"):
        read_checkpoint(path)


def test_a_pointer_to_nowhere_is_passed_over(tmp_path: Path):
    save(tmp_path, 10)
    (tmp_path / "step-00000099").symlink_to(tmp_path / "missing")
    (tmp_path / "step-latest").symlink_to(tmp_path / "missing")
    found, passed_over = newest_complete(tmp_path)
    assert found is not None
    assert found.position.step == 10
    assert sorted(name for name, _ in passed_over) == ["step-00000099", "step-latest"]


def test_a_renamed_checkpoint_is_not_believed(tmp_path: Path):
    save(tmp_path, 10).rename(tmp_path / "step-00000030")
    found, passed_over = newest_complete(tmp_path)
    assert found is None
    assert "step 10" in passed_over[0][1]


def test_half_written_folders_are_invisible_and_swept(tmp_path: Path):
    save(tmp_path, 10)
    half = tmp_path / ".step-00000020.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert newest_complete(tmp_path)[1] == []
    sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010"]


def test_a_broken_one_of_the_same_step_makes_room(tmp_path: Path):
    cut_model(save(tmp_path, 20))
    save(tmp_path, 20)
    assert newest_complete(tmp_path)[1] == []


def test_a_complete_one_of_the_same_step_is_never_replaced(tmp_path: Path):
    save(tmp_path, 20)
    with pytest.raises(CheckpointError, match="is there already"):
        save(tmp_path, 20)


def test_pruning_keeps_the_newest(tmp_path: Path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    assert prune(tmp_path, newest=40, keep=2) == ["step-00000010", "step-00000020"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]


def test_a_broken_one_never_pushes_a_good_one_out(tmp_path: Path):
    save(tmp_path, 10)
    cut_model(save(tmp_path, 20))
    cut_model(save(tmp_path, 50))
    save(tmp_path, 30)
    prune(tmp_path, newest=30, keep=2)
    assert read_checkpoint(tmp_path / "step-00000010").position.step == 10
    assert read_checkpoint(tmp_path / "step-00000030").position.step == 30


def test_other_data_and_settings_are_named(tmp_path: Path):
    found = read_checkpoint(save(tmp_path, 1))
    with pytest.raises(ResumeRefused, match=r"dataset was abc, is xyz; decay was 0.8, is 0.9"):
        found.refuse_other(data={"dataset": "xyz"}, settings={**SETTINGS, "decay": 0.9})


CHILD = """
import importlib.util, resource, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("saver", sys.argv[1])
saver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(saver)
folder, limit = Path(sys.argv[2]), int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        saver.save(folder, 20, numbers=1_000_000)
    except saver.CheckpointError as error:
        print(error)
else:
    for step in range(11, 10_000):
        print(step, flush=True)
        saver.save(folder, step, numbers=200_000)
        saver.prune(folder, newest=step, keep=1)
"""


def start_child(folder: Path, *, limit_bytes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, __file__, str(folder), str(limit_bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_full_disk_leaves_the_previous_one_and_says_how_much_was_wanted(tmp_path: Path):
    save(tmp_path, 10)
    child = start_child(tmp_path, limit_bytes=1_000_000)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "cannot be written" in said
    assert "8,000,0" in said  # two tensors of a million float32, and the small ones
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000010"]


@pytest.mark.parametrize("writes", [1, 3])
def test_a_kill_while_saving_leaves_a_complete_one(tmp_path: Path, writes: int):
    save(tmp_path, 10)
    child = start_child(tmp_path, limit_bytes=0)
    assert child.stdout is not None
    for _ in range(writes):
        child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    sweep(tmp_path)
    found, passed_over = newest_complete(tmp_path)
    assert found is not None
    assert found.position.step >= 10 + writes - 1
    assert passed_over == []
