"""The door by which every error leaves: found, wanted, next step, code, and an exit status."""

import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from pipeline.faults import Fault, described
from pipeline.slate.files import disk_fault
from pipeline.slate.log import SAY, log_only, open_log, printable
from pipeline.slate.progress import to_nowhere
from pipeline.slate.stage import StageStopped

_INTERRUPTED = 130


def guard(command: Callable[[], Any]) -> None:
    """Runs a command. Status: 0 done, 1 an explained fault, 2 usage, 70 a bug, 128 + signal."""
    try:
        status = command()
        if status == _INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
    except Fault as fault:
        log_only(traceback.format_exc())
        _say_error(fault.found, fault.wanted, fault.next_step, code=fault.code)
        sys.exit(1)
    except (KeyboardInterrupt, StageStopped, typer.Abort) as stopped:
        log_only(traceback.format_exc())
        _say_error(
            "stopped before the end; nothing was sealed",
            "a run to the end",
            "the same command with RESUME=1 continues",
            code="CS-STOPPED",
        )
        sys.exit(128 + stopped.number if isinstance(stopped, StageStopped) else _INTERRUPTED)
    except Exception as error:
        disk = isinstance(error, OSError) and disk_fault(
            error, place=Path.cwd(), next_step="the same command"
        )
        if disk:  # outside of a stage
            log_only(traceback.format_exc())
            _say_error(disk.found, disk.wanted, disk.next_step, code=disk.code)
            sys.exit(1)
        if type(error).__module__.split(".")[0] in ("click", "typer"):
            found = str(error) or type(error).__name__
            _say_error(found, "a command as in --help", "--help", code="CS-USAGE")
            sys.exit(2)
        _unexpected(error)
        sys.exit(70)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        _unexpected(error)  # a panic of a library in Rust
        sys.exit(70)
    if isinstance(status, int) and status:  # click gives the status of an Exit back
        sys.exit(status)


def _unexpected(error: BaseException) -> None:
    trace = traceback.format_exc()
    if not any(isinstance(handler, logging.FileHandler) for handler in SAY.handlers):
        try:
            open_log(Path("runs").absolute(), stage="error")
        except OSError:  # in a container, before the run's own log is open
            sys.stderr.write(trace)
    log_only(trace)
    logs = [h.baseFilename for h in SAY.handlers if isinstance(h, logging.FileHandler)]
    _say_error(
        f"unexpected {described(error)}",
        "no such error: this is a fault of this program",
        f"the traceback is in {logs[0] if logs else 'the lines above'}; please report it",
        code="CS-BUG",
    )


def _say_error(found: str, wanted: str, next_step: str, *, code: str) -> None:
    said = f"error: {found}\n  wanted: {wanted}\n  next:   {next_step}\n  code:   {code}\n"
    try:
        sys.stderr.write(printable(said))
    except OSError:
        to_nowhere(sys.stderr)
    log_only(f"error {code}: {found}; wanted: {wanted}; next: {next_step}")
