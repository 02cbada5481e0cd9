"""The log of a run: a file of its own for every start, and short lines for the person."""

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from pipeline.slate.files import named
from pipeline.slate.progress import to_nowhere

SAY = logging.getLogger("pipeline")  # what the person sees; the log has it too, with times


class _LogFile(logging.FileHandler):
    """A log that cannot be written ends the stage: OSError, naming the file."""

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802  of the library
        with named(Path(self.baseFilename)):
            raise  # the handler's own error, in whose hands this runs


class _Screen(logging.StreamHandler[TextIO]):
    """A terminal that was closed, or a reader that went away, is no reason to stop the work."""

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802  of the library
        to_nowhere(self.stream)


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
    file = _LogFile(path, encoding="utf-8")
    file.setFormatter(_Plain("%(asctime)s %(levelname)s %(message)s"))
    screen = _Screen(sys.stdout)
    screen.setFormatter(_Plain("%(message)s"))
    SAY.addHandler(file)
    SAY.addHandler(screen)
    SAY.setLevel(logging.INFO)
    SAY.propagate = False
    return path


class _Plain(logging.Formatter):
    """Lines in which nothing but printable text, line breaks and tabs is left."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def printable(text: str) -> str:
    """Text with control characters and halves of characters as escapes.

    Names and texts come from files of others; a terminal obeys what it is sent.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def log_only(message: str) -> None:
    """Writes to the log files but not to the screen; a log that cannot be written stays without."""
    record = logging.LogRecord(SAY.name, logging.INFO, __file__, 0, message, None, None)
    for handler in SAY.handlers:
        if isinstance(handler, logging.FileHandler):
            with contextlib.suppress(OSError):
                handler.handle(record)
