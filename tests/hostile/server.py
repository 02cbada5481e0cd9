"""A process that reads spoilt files, with 1 GiB more than it starts with; templates: 2 s, 256 MiB.

A line in: {"reader", "path"} or {"cli": [arguments]}. A line out: {"kind": read | skip | fault |
crash | exit, ...}. What no `except` can stop (an abort, an endless loop) ends this process, not the
tests.
"""

import contextlib
import io
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from pipeline import cli
from pipeline.conversations import render, template
from pipeline.conversations.normalise import Skip
from pipeline.faults import Fault
from pipeline.slate.door import guard
from tests.hostile.readers import READERS

ROOM_BYTES = 1 << 30


def _read(name: str, path: Path) -> dict[str, Any]:
    try:
        READERS[name](path)
    except Fault as fault:
        parts = [fault.found, fault.wanted, fault.next_step]
        return {"kind": "fault", "type": type(fault).__name__, "parts": parts}
    except Skip as skip:
        return {"kind": "skip", "type": skip.reason, "parts": [skip.detail]}
    except BaseException:
        return {"kind": "crash", "trace": traceback.format_exc()[-3000:]}
    return {"kind": "read"}


def _command(arguments: list[str]) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            guard(lambda: cli.app(arguments, standalone_mode=False))
            code: Any = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            return {"kind": "crash", "trace": traceback.format_exc()[-3000:]}
    return {"kind": "exit", "status": code, "said": said.getvalue()}


def main() -> None:
    torch.set_num_threads(1)
    template.SECONDS, template.ROOM_BYTES, render.SECONDS = 2.0, 1 << 28, 2.0
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with Path("/proc/self/statm").open() as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        asked = json.loads(line)
        if "cli" in asked:
            outcome = _command(asked["cli"])
        else:
            outcome = _read(asked["reader"], Path(asked["path"]))
        answers.write(json.dumps(outcome) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
