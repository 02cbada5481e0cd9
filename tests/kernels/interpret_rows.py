"""Runs the Triton forms of rows, judge and adamw by Triton's interpreter; prints what differed.

python -m tests.kernels.interpret_rows, with TRITON_INTERPRET=1 from the start: Triton looks at it
when it is imported. Prints one JSON object: case to what went wrong, empty when nothing did.
"""

import json
import sys

import torch

from tests.kernels.comparing import SMALL, Side

DTYPES = ("float32", "bfloat16")


def main() -> None:
    from pipeline.kernels.cuda import adamw, judge, norms, rows
    from pipeline.kernels.cuda.blocks import Device

    # Few multiprocessors, so that each program of `rms_norm_backward` takes several rows.
    norms.device_of = lambda _: Device(120, 101376, 5)
    found = {}
    for dtype in DTYPES:
        side = Side(norms, rows, judge, adamw, "cpu", getattr(torch, dtype))
        for name, case in SMALL.items():
            torch.manual_seed(0)
            try:
                case(side)
                found[f"{name}-{dtype}"] = ""
            except Exception as error:
                found[f"{name}-{dtype}"] = f"{type(error).__name__}: {error}"
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
