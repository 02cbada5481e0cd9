"""What hints name exists."""

import re

from pipeline.host.codes import CODES
from pipeline.nccl.errors import FAILED, HANG, HINTS, SUM, SUSPECT


def test_hints_name_codes_that_hosts_have() -> None:
    named = {*re.findall(r"HOST-[A-Z-]+[A-Z]", " ".join([SUSPECT, *HINTS.values()]))}
    assert named
    assert named <= {*CODES, HANG, SUM, FAILED}
    assert {*HINTS} == {HANG, SUM, FAILED}
