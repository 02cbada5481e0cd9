"""Several ranks that end badly: every one says why, and of those that cannot one is blamed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pipeline.training.launch import cause_of


def failures(*exit_codes: int) -> dict[int, ProcessFailure]:
    """One failure a rank, in an order that says nothing."""
    ranks = {
        rank: ProcessFailure(local_rank=rank, pid=70 + rank, exitcode=code, error_file="")
        for rank, code in enumerate(exit_codes)
    }
    return dict(reversed(ranks.items()))


@pytest.mark.parametrize(
    ("exit_codes", "words", "look"),
    [
        ((-15, -9, -15), "rank 1 (pid 71) was killed by SIGKILL, signal 9", "out-of-memory"),
        ((-15, -15, 3), "rank 2 (pid 72) ended with status 3", "read this stage's log"),
        ((1, -11), "rank 1 (pid 71) was killed by SIGSEGV, signal 11", "read this stage's log"),
        ((-7, 1), "rank 0 (pid 70) was killed by SIGBUS, signal 7", "full tmpfs or a bad disk"),
    ],
)
def test_the_rank_to_blame_is_not_one_that_was_stopped_because_of_it(
    exit_codes: tuple[int, ...], words: str, look: str
) -> None:
    cause = cause_of(failures(*exit_codes), ranks=len(exit_codes))
    assert cause.found == words
    assert look in cause.next_step
    assert cause.code == "CS-RANK"


def test_ranks_that_cannot_start_say_so_each_under_its_own_number(tmp_path: Path) -> None:
    request = tmp_path / "absent.json"
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.training.launch", "2", str(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    *own, blamed = [json.loads(line)["message"] for line in done.stdout.splitlines()]
    # Whichever is first ends the others, maybe before they spoke.
    assert own
    assert all(str(request) in words for words in own)
    assert {words.partition("/")[0] for words in own} <= {"", "rank 1: "}
    assert re.fullmatch(r"rank [01] \(pid \d+\) ended with status 1", blamed)
