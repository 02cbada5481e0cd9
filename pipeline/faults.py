"""The one shape of every error a user can meet: what was found, what was wanted, the next step.

Each room derives its own base class from `Fault`; the front prints any of them without a traceback.
"""

import traceback
from pathlib import Path


class Fault(Exception):
    """An error with its three parts.

    found: what is there, naming the file, sample, GPU or setting.
    wanted: what should have been there.
    next_step: what the user does now, as a command or a setting where possible.
    code: says the same of every version, for scripts and searches; docs/faults.md lists all of
    them. A class has its own or its parent's; an error that came from another process keeps that.
    """

    code: str = ""

    def __init__(self, found: str, *, wanted: str, next_step: str, code: str = "") -> None:
        super().__init__(found, wanted, next_step)
        self.code = code or type(self).code
        self.found = found
        self.wanted = wanted
        self.next_step = next_step

    def __reduce__(self) -> tuple[object, ...]:
        # Faults cross process borders; the default would lose the keyword arguments.
        return _rebuild, (type(self), self.found, self.wanted, self.next_step, self.code)

    def __str__(self) -> str:
        return f"{self.found}; wanted {self.wanted}; next: {self.next_step}"


def described(error: BaseException) -> str:
    """An error that nobody foresaw: its type, its words if it has any, and where it was raised."""
    trace = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(trace[-1].filename).name} line {trace[-1].lineno})" if trace else ""
    return f"{type(error).__name__}: {str(error).strip() or '(no message)'}{place}"


def _rebuild(kind: type[Fault], found: str, wanted: str, next_step: str, code: str) -> Fault:
    return kind(found, wanted=wanted, next_step=next_step, code=code)
