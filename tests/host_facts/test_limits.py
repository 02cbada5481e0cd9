import os
import pwd
from collections.abc import Callable

import pytest

from pipeline.host.limits import Limits, parse_limits, read_limits
from pipeline.host.reader import HostReader, Missing, Output, Reader

TEXT = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max stack size            67108864             unlimited            bytes
Max open files            65536                524288               files
Max locked memory         unlimited            unlimited            bytes
"""
SOFT = {"memlock": None, "stack": 67108864, "nofile": 65536}
ME = pwd.getpwuid(os.geteuid()).pw_name


def test_soft_limits_count(simulated: str) -> None:
    assert parse_limits(TEXT, of="cleanslate") == Limits("cleanslate", SOFT)


def test_a_text_that_lacks_one_is_missing(simulated: str) -> None:
    found = parse_limits("Max stack size            8388608  unlimited  bytes\n", of="x")
    assert isinstance(found, Missing)
    assert "memlock, nofile" in found.reason


@pytest.mark.parametrize("user", [None, ME])
def test_of_this_process_where_it_is_the_users(
    recorded: Callable[..., Reader], user: str | None
) -> None:
    assert read_limits(recorded({"/proc/self/limits": TEXT}), user) == Limits(ME, SOFT)


def test_root_opens_a_session_of_the_user(
    recorded: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    reader = recorded(said={"runuser -u cleanslate -- cat /proc/self/limits": TEXT})
    assert read_limits(reader, "cleanslate") == Limits("cleanslate", SOFT)
    unknown = recorded(said={"runuser": Output(1, "", "runuser: user cleanslate does not exist")})
    assert read_limits(unknown, "cleanslate") == Missing(
        "runuser -u cleanslate: runuser: user cleanslate does not exist"
    )


def test_another_user_cannot_know(
    recorded: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    found = read_limits(recorded({"/proc/self/limits": TEXT}), "cleanslate")
    assert isinstance(found, Missing)
    assert found.reason.startswith("run as 4242")


def test_this_process_has_limits() -> None:
    found = read_limits(HostReader(), None)
    assert isinstance(found, Limits)
    assert set(found.soft) == set(SOFT)
