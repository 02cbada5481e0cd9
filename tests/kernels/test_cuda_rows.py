"""The Triton forms of rows, judge and adamw by Triton's interpreter, against the plain forms."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.settings.environment import child_environment
from tests.kernels.comparing import SMALL
from tests.kernels.interpret_rows import DTYPES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What went wrong with each case, empty when nothing did; one process for all of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpret_rows"],
        env=child_environment({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}),
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=True,
    )  # fmt: skip
    listed: dict[str, str] = json.loads(done.stdout)
    return listed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL)
def test_the_triton_form_agrees_with_the_plain_form(
    case: str, dtype: str, found: dict[str, str]
) -> None:
    assert found[f"{case}-{dtype}"] == ""
