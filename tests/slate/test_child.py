import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.settings.environment import child_environment
from pipeline.slate.child import Child
from pipeline.slate.errors import ChildFailed
from tests.processes import await_ends

ENVIRONMENT = child_environment({})


def module(tmp_path: Path, body: str) -> dict[str, str]:
    """A child module in a folder of its own; gives the environment that finds it."""
    text = (
        "import os, sys, time, subprocess\n"
        "from pipeline.slate.worker import run_worker\n"
        "def main(request, channel):\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
        + "if __name__ == '__main__':\n    run_worker(main)\n"
    )
    (tmp_path / "some_child.py").write_text(text)
    return {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}


def child(tmp_path: Path, body: str, **request: object) -> Child:
    environment = module(tmp_path, body)
    return Child("some_child", environment=environment, log=tmp_path / "log", request=request)


def test_events_come_in_order_and_prints_do_not_disturb_them(tmp_path: Path) -> None:
    body = "for n in range(request['count']):\n    print('noise')\n    channel.emit({'n': n})"
    with child(tmp_path, body, count=3) as running:
        events = list(running.events())
    assert [event.get("n") for event in events] == [0, 1, 2, None]
    assert (tmp_path / "log").read_text().count("noise") == 3


def test_further_lines_reach_the_child(tmp_path: Path) -> None:
    body = "for line in channel.receive():\n    channel.emit({'twice': line['x'] * 2})"
    with child(tmp_path, body) as running:
        running.send({"x": 4})
        running.close_input()
        assert next(running.events())["twice"] == 8


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('tensor too long')", "ValueError: tensor too long"),
        ("raise AssertionError", r"AssertionError: \(no message\)"),
        ("os._exit(3)", "ended with status 3"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL, signal 9"),
        ("os.kill(os.getpid(), 7)", "killed by SIGBUS, signal 7"),
        ("print('the last words', flush=True); os._exit(1)", "the last words"),
    ],
)
def test_a_child_that_fails_is_told_with_its_own_words(
    tmp_path: Path, body: str, words: str
) -> None:
    with child(tmp_path, body) as running, pytest.raises(ChildFailed, match=words):
        list(running.events())


@pytest.mark.parametrize(
    ("number", "words"), [(9, "out-of-memory killer is the usual cause"), (7, "full tmpfs")]
)
def test_a_killed_child_is_told_with_the_usual_cause_and_where_to_look(
    tmp_path: Path, number: int, words: str
) -> None:
    with (
        child(tmp_path, f"os.kill(os.getpid(), {number})") as running,
        pytest.raises(ChildFailed) as caught,
    ):
        list(running.events())
    assert words in caught.value.next_step
    assert "dmesg -T" in caught.value.next_step


def test_a_child_that_is_silent_for_too_long_is_told_with_its_state(tmp_path: Path) -> None:
    environment = module(tmp_path, "channel.emit({'n': 1})\ntime.sleep(600)")
    with (
        Child(
            "some_child",
            environment=environment,
            log=tmp_path / "log",
            request={},
            silence_seconds=3.0,
        ) as running,
        pytest.raises(
            ChildFailed, match=r"some_child \(pid \d+, S \(sleeping\)\) is silent for [3-9] s"
        ),
    ):
        list(running.events())


def test_a_child_that_is_stopped_ends_with_its_context_all_the_same(tmp_path: Path) -> None:
    # With a handler of its own, as servers and torchrun have: else the kernel ends it at once.
    body = "import signal\nsignal.signal(15, lambda *_: os._exit(0))\n"
    with child(tmp_path, body + "channel.emit({'n': 1})\ntime.sleep(600)") as running:
        next(running.events())
        psutil.Process(running.pid).suspend()
        started = time.monotonic()
    assert time.monotonic() - started < 15  # a kill would come after 20 s


def test_a_fault_keeps_its_three_parts(tmp_path: Path) -> None:
    body = (
        "from pipeline.faults import Fault\n"
        "raise Fault('3 rows', wanted='5', next_step='turn the cache off')"
    )
    with child(tmp_path, body) as running, pytest.raises(ChildFailed) as caught:
        list(running.events())
    assert "3 rows" in caught.value.found
    assert caught.value.wanted == "5"
    assert caught.value.next_step == "turn the cache off"
    assert "Traceback" in (tmp_path / "log").read_text()


def test_leaving_the_context_ends_the_child_and_children_that_ignore_the_request(
    tmp_path: Path,
) -> None:
    body = (
        "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); '\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', code + 'time.sleep(600)'], "
        "stdout=subprocess.PIPE)\n"
        "grandchild.stdout.readline()\n"
        "channel.emit({'pid': grandchild.pid})\n"
        "time.sleep(600)"
    )
    with child(tmp_path, body) as running:
        grandchild = psutil.Process(next(running.events())["pid"])
    assert not psutil.pid_exists(running.pid)
    grandchild.wait(10)
    assert not grandchild.is_running()


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    environment = module(tmp_path, "channel.emit({'pid': os.getpid()}); time.sleep(600)")
    code = (
        "from pathlib import Path\n"
        "from pipeline.slate.child import Child\n"
        f"child = Child('some_child', environment={environment!r}, "
        f"log=Path({str(tmp_path / 'log')!r}), request={{}})\n"
        "print(next(child.events())['pid'], flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    await_ends([pid], within=10.0)
