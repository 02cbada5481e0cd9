"""Signals, closed terminals, workers that die or hang, and two commands at once."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.processes import alive, below
from tests.stages.conftest import ROOT, Project

from .running import Command, refuses, start, state_of, three_parts, until

pytestmark = pytest.mark.faults


def training(project: Project, *arguments: str) -> Command:
    """A training from nothing that has its first checkpoint."""
    (project.folder / "train").rename(project.root.parent / "old")
    command = start(project, "train", *arguments)
    first = project.folder / "train" / "checkpoints" / "step-00000004"
    until(lambda: first.exists() or not command.process.is_alive())
    return command


LONG = ("--set", "train.epochs=12")  # 24 steps: time to be stopped in


@pytest.mark.parametrize(
    ("sent", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["service-manager", "closed-terminal"],
)
def test_a_stopped_training_leaves_no_process_says_so_and_can_be_resumed(
    project: Project, sent: signal.Signals, status: int
) -> None:
    command = training(project, *LONG)
    family = below(command.pid)
    os.kill(command.pid, sent)
    os.kill(command.pid, sent)  # a second one must not break the order in which things end
    assert command.wait() == status
    assert "stopped before the end" in three_parts(command.said)
    assert alive(family) == []
    assert state_of(project, "train") == "unsealed"


def test_a_command_that_ignores_hangups_goes_on_after_its_terminal_is_closed(
    project: Project,
) -> None:
    straight = state_of(project, "export")
    logs = len(list((project.folder / "logs").iterdir()))
    master, slave = os.openpty()
    command = subprocess.Popen(
        project.arguments("export"),
        cwd=ROOT,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),  # as nohup does
    )
    until(lambda: len(list((project.folder / "logs").iterdir())) > logs)
    os.close(slave)
    os.close(master)  # from now on every write to the screen is an error
    os.kill(command.pid, signal.SIGHUP)
    assert command.wait() == 0
    assert state_of(project, "export") == straight


@pytest.mark.parametrize("other", ["train", "extract", "clean-slate", "verify"])
def test_a_second_command_on_a_run_is_refused_at_once_with_who_holds_it(
    project: Project, other: str
) -> None:
    command = start(project, "train")
    until(lambda: "train" in (project.folder / ".lock").read_text())
    until(lambda: f'"pid": {command.pid}' in (project.folder / ".lock").read_text())
    os.kill(command.pid, signal.SIGSTOP)
    try:
        said = refuses(project, other)
        assert f'"pid": {command.pid}, "purpose": "train"' in said
    finally:
        command.process.kill()
        command.wait()


def test_a_worker_that_the_kernel_kills_is_told_with_the_usual_cause_and_where_to_look(
    project: Project,
) -> None:
    command = start(project, "evaluate")
    until(lambda: below(command.pid, "pipeline.evaluation.worker"))
    below(command.pid, "pipeline.evaluation.worker")[0].kill()
    assert command.wait() == 1
    said = three_parts(command.said)
    assert re.search(
        r"pipeline.evaluation.worker \(pid \d+\) .* was killed by SIGKILL, signal 9", said
    )
    assert "out-of-memory killer is the usual cause" in said
    assert "dmesg" in said
    assert "RESUME=1" in said
    assert state_of(project, "evaluate") == "unsealed"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_several_ranks_that_is_killed_ends_all_and_the_cause_is_told(
    project: Project, rank: int
) -> None:
    more = ("--set", "train.ranks=2", "--set", "train.tokens_per_pack=256", *LONG)
    command = training(project, *more)
    ranks = below(command.pid, "pipeline.training.worker")
    [victim] = [one for one in ranks if one.environ()["RANK"] == str(rank)]
    family = below(command.pid)
    victim.kill()
    assert command.wait() == 1
    said = three_parts(command.said)
    assert f"rank {rank} (pid {victim.pid}) was killed by SIGKILL, signal 9" in said
    assert "out-of-memory killer is the usual cause" in said
    assert alive(family) == []
    assert state_of(project, "train") == "unsealed"


def test_a_worker_that_hangs_ends_the_stage_after_the_time_of_the_settings(
    project: Project,
) -> None:
    command = start(project, "extract", "--set", "run.silence_seconds=4")
    until(lambda: below(command.pid, "pipeline.capture.worker"))
    [worker] = below(command.pid, "pipeline.capture.worker")
    worker.suspend()
    assert command.wait() == 1
    said = three_parts(command.said)
    line = r"^error: pipeline.capture.worker \(pid \d+, T \(stopped\)\) is silent for [4-9] s"
    assert re.search(line, said, re.MULTILINE)  # not one of the warnings in its last words
    assert "run.silence_seconds" in said
    assert not worker.is_running() or worker.status() == "zombie"
    assert list((project.root / "staging").glob("tiny-*")) == []
    assert Path(project.folder / "extract" / ".cleanslate.json").exists()
