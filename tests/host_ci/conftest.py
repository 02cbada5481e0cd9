"""One fresh machine in a container, for the converge test."""

from collections.abc import Iterator

import pytest

from tests.host_ci.machine import Machine, machine


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Nothing was done to it yet; it is removed at the end, whatever happened."""
    with machine(tmp_path_factory.mktemp("machine")) as one:
        yield one
