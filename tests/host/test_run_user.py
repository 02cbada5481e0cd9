"""The user that stages run as, and what belongs to it."""

import pytest
from testinfra.host import Host

from pipeline.host.wanted import Wanted, WantedUser
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state


@pytest.fixture
def asked(wanted: Wanted) -> WantedUser:
    if wanted.run_user is None:
        pytest.skip("run_user: not wanted")
    return wanted.run_user


def test_the_user_is_there(host: Host, asked: WantedUser) -> None:
    user = host.user(asked.name)
    found = f"uid {user.uid}" if user.exists else "not there"
    if found != f"uid {asked.uid}":
        refuse(
            "HOST-USER",
            f"user {asked.name} is {found}",
            wanted=f"uid {asked.uid}",
            next_step=by_role("run_user"),
        )


def test_the_user_is_in_a_group(host: Host, asked: WantedUser, group: str) -> None:
    user = host.user(asked.name)
    if not user.exists:
        pytest.skip(f"no user {asked.name}: another test says so")
    if group not in user.groups:
        refuse(
            "HOST-USER",
            f"{asked.name} is in {', '.join(user.groups)}",
            wanted=f"{group} too",
            next_step=by_role("run_user") + "; then log in anew",
        )


def test_a_directory_is_the_user_s(host: Host, asked: WantedUser, directory: str) -> None:
    done = host.run("stat --format '%%F %%u' %s", directory)
    if done.stdout.strip() != f"directory {asked.uid}":
        refuse(
            "HOST-USER-DIRECTORY",
            f"{directory} is {done.stdout.strip() or 'not there'}",
            wanted=f"a directory of user {asked.uid}",
            next_step=by_role("run_user"),
        )
