"""Work beside the caller: its value or its error, and no longer than it may take."""

import os
import threading
import time

import pytest

from pipeline.conversations.bounds import within


def test_it_gives_what_the_work_gives_or_raises() -> None:
    assert [within(30, lambda n=n: n * n) for n in range(3)] == [0, 1, 4]
    with pytest.raises(KeyError, match="gone"):
        within(30, lambda: {}["gone"])
    assert within(30, threading.get_ident) == within(30, threading.get_ident)  # one for all


def test_what_takes_too_long_is_left_to_itself_and_the_next_does_not_wait_for_it() -> None:
    end = threading.Event()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="not done in 0 s"):
        within(0.05, lambda: end.wait(60))
    assert within(30, lambda: "next") == "next"
    assert time.monotonic() - begun < 30
    end.set()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_does_its_own() -> None:
    within(30, int)
    child = os.fork()
    if child == 0:
        os._exit(within(30, lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
