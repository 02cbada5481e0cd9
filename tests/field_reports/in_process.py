"""The public front in this process, which pays for the imports once."""

import contextlib
import io
import sys
from dataclasses import dataclass

import torch

from pipeline import cli


@dataclass(frozen=True)
class Done:
    """What a command left: exit status, output, errors."""

    status: int
    out: str
    err: str


def front(*arguments: str) -> Done:
    """The command line `python -m pipeline.cli ARGUMENTS`."""
    before, sys.argv = sys.argv, ["cli", *arguments]
    threads = torch.get_num_threads()
    out, err, status = io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as left:
        status = int(left.code or 0)
    finally:
        sys.argv = before
        torch.set_num_threads(threads)
    return Done(status, out.getvalue(), err.getvalue())
