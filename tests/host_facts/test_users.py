import os
import pwd
from collections.abc import Callable

import pytest

from pipeline.host.reader import HostReader, Missing, Output, Reader
from pipeline.host.users import User, read_folders, read_user

ENTRY = "cleanslate:x:2000:2000::/home/cleanslate:/bin/bash\n"


def test_uid_and_groups(recorded: Callable[..., Reader]) -> None:
    said = {"getent passwd cleanslate": ENTRY, "id -nG cleanslate": "cleanslate docker\n"}
    found = read_user(recorded(said=said), "cleanslate")
    assert found == User("cleanslate", 2000, ("cleanslate", "docker"))


def test_no_such_user_is_none_and_no_answer_is_missing(recorded: Callable[..., Reader]) -> None:
    assert read_user(recorded(said={"getent": Output(2, "")}), "cleanslate") is None
    assert isinstance(read_user(recorded(), "cleanslate"), Missing)
    assert isinstance(read_user(recorded(said={"getent": Output(3, "")}), "x"), Missing)
    assert isinstance(read_user(recorded(said={"getent": "?", "id": "x"}), "x"), Missing)
    assert isinstance(read_user(recorded(said={"getent": ENTRY}), "cleanslate"), Missing)


def test_whoever_runs_this_is_a_user() -> None:
    name = pwd.getpwuid(os.geteuid()).pw_name
    found = read_user(HostReader(), name)
    assert isinstance(found, User)
    assert found.uid == os.geteuid()


@pytest.mark.parametrize("path", ["/srv/runs", "/srv/none"])
def test_folders_have_their_owner(recorded: Callable[..., Reader], path: str) -> None:
    entry = read_folders(recorded({"/srv/runs/x": ""}), [path])[path]
    assert isinstance(entry, Missing) is (path == "/srv/none")
