from collections.abc import Callable

import pytest

from pipeline.host.packages import Package, parse_packages, read_packages, upstream
from pipeline.host.reader import Missing, Output, Reader

SAID = "hi |nvidia-open|580.95.05-1\nii |docker.io|20.10.24+dfsg1-1\nrc |old|1.0\nun |gone|\n"
FOUND = {
    "nvidia-open": Package("nvidia-open", "580.95.05-1", held=True),
    "docker.io": Package("docker.io", "20.10.24+dfsg1-1", held=False),
}


def test_held_and_merely_installed_are_told_apart_and_leftovers_do_not_count(
    simulated: str,
) -> None:
    assert parse_packages(SAID) == FOUND


def test_a_name_that_dpkg_does_not_know_is_no_failure(recorded: Callable[..., Reader]) -> None:
    reader = recorded(said={"dpkg-query": Output(1, SAID, "no packages found matching x")})
    assert read_packages(reader, ["nvidia-open", "docker.io", "x"]) == FOUND


@pytest.mark.parametrize("said", [{}, {"dpkg-query": Output(2, "", "database is locked")}])
def test_without_an_answer_nothing_is_known(
    recorded: Callable[..., Reader], said: dict[str, Output]
) -> None:
    assert isinstance(read_packages(recorded(said=said), ["x"]), Missing)


@pytest.mark.parametrize(
    ("version", "part"),
    [("580.95.05-1", "580.95.05"), ("1:580.95.05-0ubuntu1", "580.95.05"), ("1.18.1", "1.18.1"),
     ("5-2-1", "5-2")],
)  # fmt: skip
def test_upstreams_part_of_a_version(version: str, part: str) -> None:
    assert upstream(version) == part
