"""Rendering in one process and in several: the same outcomes, in order, one a record."""

import os
import signal
import subprocess
import sys
import time
from itertools import chain, count, islice
from pathlib import Path

import pytest

from pipeline.conversations.normalise import Skip
from pipeline.conversations.pool import RenderSpec, render_records
from pipeline.conversations.read import Record, Unreadable
from pipeline.conversations.render import Rendered
from pipeline.faults import Fault


@pytest.fixture(scope="module")
def spec(tmp_path_factory, tokenizer_with, templates, end_ids) -> RenderSpec:
    folder = tmp_path_factory.mktemp("target")
    tokenizer_with(templates["chatml"]).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return RenderSpec(
        folder=folder,
        remote_code=False,
        end_of_turn_ids=end_ids,
        max_length=64,
        too_long="skip",
    )


def record(line: int) -> Record:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": f"No {line}."}]
    return Record("a.jsonl", line, {"conversations": turns})


RECORDS = [
    *map(record, range(1, 70)),
    Unreadable("a.jsonl", 70, "not JSON"),
    Record("a.jsonl", 71, {"messages": []}),
    *map(record, range(72, 100)),
]


def test_every_record_comes_out_once_and_in_order(spec):
    pairs = list(render_records(iter(RECORDS), spec, workers=1))
    assert [one for one, _ in pairs] == RECORDS
    skipped = {o.reason: one.line for one, o in pairs if isinstance(o, Skip)}
    assert skipped == {"unreadable": 70, "no_messages": 71}
    assert sum(isinstance(outcome, Rendered) for _, outcome in pairs) == 97


def test_several_processes_give_what_one_gives_and_read_only_a_little_ahead(spec):
    taken: list[Record | Unreadable] = []

    def endless():
        for one in chain(RECORDS, map(record, count(100))):
            taken.append(one)
            yield one

    pairs = render_records(endless(), spec, workers=2)
    several = list(islice(pairs, len(RECORDS)))
    pairs.close()
    alone = list(render_records(RECORDS, spec, workers=1))
    assert [one for one, _ in several] == RECORDS
    assert [told(outcome) for _, outcome in several] == [told(outcome) for _, outcome in alone]
    assert len(taken) <= len(RECORDS) + 2 * 3 * 32


def told(outcome: Rendered | Skip) -> Rendered | str:
    return str(outcome) if isinstance(outcome, Skip) else outcome


def test_a_missing_target_is_a_fault_before_any_record(spec, tmp_path):
    nowhere = RenderSpec(tmp_path / "none", False, spec.end_of_turn_ids, 64, "skip")
    with pytest.raises(Fault):
        render_records(RECORDS, nowhere, workers=2)


CHILD = """
import sys
from itertools import chain, count, islice
from pathlib import Path
from pipeline.conversations.pool import RenderSpec, render_records
from pipeline.conversations.read import Unreadable

if __name__ == "__main__":
    spec = RenderSpec(Path(sys.argv[1]), False, frozenset({1}), 64, "skip")
    endless = (Unreadable("a", line, "x") for line in count(1))
    for one, _ in render_records(endless, spec, workers=2):
        if one.line == 1:
            print("going", flush=True)
"""


def test_workers_end_when_their_parent_is_killed(spec, tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, script, spec.folder],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        process_group=0,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"going\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert ended(child.pid, within_seconds=20)


def ended(group: int, *, within_seconds: float) -> bool:
    """Whether the process group is without living members in time."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        if not any(living(pid, group) for pid in Path("/proc").glob("[0-9]*")):
            return True
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return False


def living(process: Path, group: int) -> bool:
    try:
        state, _, own_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return False
    return int(own_group) == group and state != "Z"
