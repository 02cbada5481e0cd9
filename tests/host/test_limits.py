"""Resource limits that a session of the run user gets."""

import pytest
from testinfra.host import Host

from pipeline.host.wanted import Wanted, WantedLimits
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state
_ASK = "ulimit -S -l; ulimit -S -s; ulimit -S -n"


@pytest.fixture
def asked(wanted: Wanted) -> WantedLimits:
    if wanted.limits is None or wanted.run_user is None:
        pytest.skip("limits: not wanted")
    return wanted.limits


@pytest.fixture
def found(host: Host, wanted: Wanted, asked: WantedLimits) -> dict[str, float]:
    """Soft limits of a new session: memlock and stack in bytes, nofile as a count."""
    assert wanted.run_user is not None
    name = wanted.run_user.name
    if host.user().name == name:
        done = host.run(f"sh -c '{_ASK}'")
    elif host.user().uid == 0:
        # --login: the limits are set where a session begins.
        done = host.run(f"su --login --shell /bin/sh --command '{_ASK}' %s", name)
    else:
        pytest.skip(f"limits are read as root or {name}: connect as one of them")
    if done.rc != 0:
        pytest.skip(f"no session of {name} can be begun: test_run_user says why")
    # The last three lines: a login may greet.
    memlock, stack, nofile = (_number(text) for text in done.stdout.split()[-3:])
    return {"memlock": memlock * 1024, "stack": stack * 1024, "nofile": nofile}


def test_memory_can_be_locked(asked: WantedLimits, found: dict[str, float]) -> None:
    _least("memlock", asked.memlock, found)


def test_the_stack_may_grow(asked: WantedLimits, found: dict[str, float]) -> None:
    _least("stack", asked.stack_bytes, found)


def test_files_can_be_open(asked: WantedLimits, found: dict[str, float]) -> None:
    _least("nofile", asked.nofile_at_least, found)


def _number(text: str) -> float:
    return float("inf") if text == "unlimited" else float(text)


def _least(name: str, least: int | str | None, found: dict[str, float]) -> None:
    if least is None:
        pytest.skip(f"limits.{name}: not wanted")
    if found[name] < _number(str(least)):
        refuse(
            "HOST-LIMITS",
            f"{name} is {found[name]:.0f}",
            wanted=f"{least} or more",
            next_step=by_role("tuning") + "; then log in anew",
        )
