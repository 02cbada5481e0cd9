"""The Triton form by Triton's interpreter, against the plain form.

The interpreter has to be chosen before Triton is imported: a test runs this file as a program.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.attention_chain import assert_near, computed, make_chain

ROOT = Path(__file__).parents[2]

# The interpreter multiplies no bfloat16 matrices; float16 takes the same way through the kernels.
FLOAT, HALF = {"dtype": torch.float32}, {"dtype": torch.float16}
GROUPS: dict[str, list[tuple[list[int], tuple[float, ...], dict[str, Any]]]] = {
    "head widths and groups": [
        ([70, 1, 40], (0.5, 0.2), {"d": 16, "groups": 1, **FLOAT}),
        ([37], (0.8, 0.6, 0.3), {"d": 64, "groups": 7, "kv": 1, **FLOAT}),
        ([45, 50], (0.6, 0.3), {"d": 128, "kv": 1, **FLOAT}),
        ([40, 9], (0.4, 0.3), {"d": 12, **FLOAT}),
    ],
    "rows and documents": [
        ([1], (1.0,) * 4, FLOAT),
        ([1] * 70, (1.0, 0.5), FLOAT),
        ([200], (0.0, -1.0), FLOAT),
        ([3, 150, 2, 90], (0.3, 0.1, 0.02), FLOAT),
        ([32, 32, 64], (1.0,) * 3, FLOAT),
        ([129], (1.0,), FLOAT),
    ],
    "half precision": [([90, 1, 70], (0.7, 0.5, 0.2), {"d": 32, **HALF})],
    "no rows": [([4], (-1.0, -1.0), FLOAT), ([], (1.0, 1.0), FLOAT)],
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("group", GROUPS)
def test_the_triton_form_equals_the_plain_one_for(group):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # noqa: TID251  the test's own child
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_cuda_attention", group],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]


class Fused:
    """The Triton form with the room's signatures: without what only the plain form reads."""

    @staticmethod
    def attend(*inputs, spans, **outputs) -> None:
        from pipeline.kernels.cuda import attention

        attention.attend(*inputs, **outputs)

    @staticmethod
    def attend_backward(*inputs, spans, d_keys, **outputs) -> None:
        from pipeline.kernels.cuda import attention

        attention.attend_backward(*inputs, **outputs)

    @staticmethod
    def attend_backward_keys(*inputs, **outputs) -> None:
        from pipeline.kernels.cuda import attention

        attention.attend_backward_keys(*inputs, **outputs)


def main(group: str) -> None:
    for documents, live, sizes in GROUPS[group]:
        chain = make_chain(documents, live, **sizes)
        relative = 2e-3 if sizes["dtype"] == torch.float16 else 1e-5
        assert_near(computed(chain, Fused), computed(chain), relative=relative)


if __name__ == "__main__":
    main(sys.argv[1])
