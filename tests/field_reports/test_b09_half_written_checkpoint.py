"""B09: a checkpoint that was cut, lost a file, or was being saved when the job ended."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.training.checkpoint import newest_complete, read_checkpoint
from pipeline.training.errors import CheckpointError
from tests.faults.running import copy_of, goes_well, start, state_of, three_parts, until
from tests.stages.conftest import Project

TWENTY = ("--set", "train.epochs=10", "--set", "train.checkpoint_every_steps=10")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run with complete checkpoints of steps 10 and 20. Not to be changed."""
    project = Project(tmp_path_factory.mktemp("b09") / "runs")
    goes_well(project, "train", *TWENTY)
    assert names(project) == ["step-00000010", "step-00000020"]
    return project


@pytest.fixture
def unsealed(trained: Project, tmp_path: Path) -> Project:
    """A copy in which training is not sealed, as after a job that was killed."""
    project = copy_of(trained, tmp_path)
    (project.folder / "train" / "manifest.json").unlink()
    return project


def checkpoints(project: Project) -> Path:
    return project.folder / "train" / "checkpoints"


def names(project: Project) -> list[str]:
    return sorted(path.name for path in checkpoints(project).iterdir())


def away(checkpoint: Path) -> None:
    """Takes a checkpoint out of the run."""
    checkpoint.rename(checkpoint.parents[2] / "away")


def cut_weights(twenty: Path) -> None:
    path = twenty / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def lose_optimizer(twenty: Path) -> None:
    (twenty / "optimizer.safetensors").unlink()


def empty_state(twenty: Path) -> None:
    (twenty / "state.json").write_bytes(b"")


def point_to_nowhere(twenty: Path) -> None:
    away(twenty)
    twenty.symlink_to(twenty.with_name("missing"))


HALVES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut weights": (cut_weights, "model.safetensors has"),
    "no optimizer": (lose_optimizer, "optimizer.safetensors: No such file"),
    "empty state": (empty_state, "state.json"),
    "pointer to nowhere": (point_to_nowhere, "state.json"),
}


@pytest.mark.parametrize("half", HALVES)
def test_a_resume_goes_on_from_step_10_and_says_why_20_was_passed_over(
    trained: Project, unsealed: Project, half: str
) -> None:
    damage, why = HALVES[half]
    damage(checkpoints(unsealed) / "step-00000020")
    said = goes_well(unsealed, "train", "--resume", *TWENTY)
    [line] = [line for line in said.splitlines() if "passed over" in line]
    assert "checkpoint step-00000020 passed over: " in line
    assert why in line
    assert "resumed after step 10" in said
    assert state_of(unsealed, "train") == state_of(trained, "train")


@pytest.mark.parametrize("half", HALVES)
def test_naming_the_half_written_one_outright_is_an_error(unsealed: Project, half: str) -> None:
    twenty = checkpoints(unsealed) / "step-00000020"
    HALVES[half][0](twenty)
    with pytest.raises(CheckpointError, match="step-00000020") as caught:
        read_checkpoint(twenty)
    assert "an earlier checkpoint" in caught.value.next_step


def test_a_kill_in_the_save_leaves_step_10_and_a_resume_equals_an_uninterrupted_run(
    trained: Project, unsealed: Project
) -> None:
    folder = checkpoints(unsealed)
    away(folder / "step-00000020")
    command = start(unsealed, "train", "--resume", *TWENTY)
    until(lambda: len(list(folder.iterdir())) > 1)  # .step-00000020.partial, while it is written
    command.process.kill()
    assert command.wait() == -9
    assert read_checkpoint(folder / "step-00000010").position.step == 10
    found, passed_over = newest_complete(folder)
    assert found is not None
    assert passed_over == []
    said = goes_well(unsealed, "train", "--resume", *TWENTY)
    assert f"resumed after step {found.position.step}" in said
    assert state_of(unsealed, "train") == state_of(trained, "train")


def test_a_full_disk_in_the_save_leaves_step_10_which_is_pruned_only_when_20_is_complete(
    trained: Project, unsealed: Project
) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    away(checkpoints(unsealed) / "step-00000020")
    one = (*TWENTY, "--set", "train.keep_checkpoints=1")
    done = unsealed.run("train", "--resume", *one, preexec=small_files)
    assert done.returncode == 1
    said = three_parts(done.stderr)
    assert "step-00000020: cannot be written" in said
    assert "File too large" in said
    assert "RESUME=1" in said
    assert names(unsealed) == ["step-00000010"]
    assert read_checkpoint(checkpoints(unsealed) / "step-00000010").position.step == 10
    goes_well(unsealed, "train", "--resume", *one)
    assert names(unsealed) == ["step-00000020"]
    assert state_of(unsealed, "train") == state_of(trained, "train")
