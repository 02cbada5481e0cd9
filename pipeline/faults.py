"""The one shape of every error a user can meet: what was found, what was wanted, the next step.

Each room derives its own base class from `Fault`; the front prints any of them without a traceback.
"""


class Fault(Exception):
    """An error with its three parts.

    found: what is there, naming the file, sample, GPU or setting.
    wanted: what should have been there.
    next_step: what the user does now, as a command or a setting where possible.
    """

    def __init__(self, found: str, *, wanted: str, next_step: str) -> None:
        super().__init__(found, wanted, next_step)
        self.found = found
        self.wanted = wanted
        self.next_step = next_step

    def __reduce__(self) -> tuple[object, ...]:
        # Faults cross process borders; the default would lose the keyword arguments.
        return _rebuild, (type(self), self.found, self.wanted, self.next_step)

    def __str__(self) -> str:
        return f"{self.found}; wanted {self.wanted}; next: {self.next_step}"


def _rebuild(kind: type[Fault], found: str, wanted: str, next_step: str) -> Fault:
    return kind(found, wanted=wanted, next_step=next_step)
