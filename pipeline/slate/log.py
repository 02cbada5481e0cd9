"""The log of a run: a file of its own for every start, and short lines for the person."""

import logging
import os
import sys
import time
from pathlib import Path

SAY = logging.getLogger("pipeline")  # what the person sees; the log has it too, with times


def open_log(root: Path, *, stage: str) -> Path:
    """Starts logs/<time>-<stage>-<pid>.log below root and sends SAY there and to stdout.

    The file is created anew; an existing one is never written to (FileExistsError).
    """
    folder = root / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = folder / f"{stamp}-{stage}-{os.getpid()}.log"
    number = 1
    while path.exists():  # the same stage twice within a second of one process
        number += 1
        path = folder / f"{stamp}-{stage}-{os.getpid()}-{number}.log"
    path.touch(exist_ok=False)
    for handler in SAY.handlers[:]:
        SAY.removeHandler(handler)
        handler.close()
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    screen = logging.StreamHandler(sys.stdout)
    screen.setFormatter(logging.Formatter("%(message)s"))
    SAY.addHandler(file)
    SAY.addHandler(screen)
    SAY.setLevel(logging.INFO)
    SAY.propagate = False
    return path


def log_only(message: str) -> None:
    """Writes to the log files but not to the screen."""
    record = logging.LogRecord(SAY.name, logging.INFO, __file__, 0, message, None, None)
    for handler in SAY.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
