"""NCCL's variables, in the file from which stages take them."""

import pytest

from pipeline.host.nccl import FILE, difference, read_nccl
from pipeline.host.wanted import Wanted
from tests.host.afar import AfarReader
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state


def test_stages_read_the_wanted_variables(reader: AfarReader, wanted: Wanted) -> None:
    if wanted.nccl is None:
        pytest.skip("nccl: not wanted")
    if said := difference(wanted.nccl.model_dump(), read_nccl(reader)):
        refuse(
            "HOST-NCCL-PROFILE",
            f"{FILE}: {said}",
            wanted="ready_host.nccl, nothing more and nothing less",
            next_step="put what make tune-nccl printed into ready_host.nccl, if it is that; then "
            + by_role("nccl"),
        )
