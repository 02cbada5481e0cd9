"""What the kernel said of GPUs since it was started."""

import re
from dataclasses import dataclass

from pipeline.host.reader import Missing, Reader

_XID = re.compile(
    r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<number>[0-9]{1,9}), ?(?P<said>.*)"
)
_GSP = re.compile(r"NVRM: .*GSP.*(halt|crash|fail|timeout|timed out)", re.IGNORECASE)
_START_SECONDS = 1.0
_TIME = re.compile(r"^\[ *([0-9]+\.[0-9]+)\]")


@dataclass(frozen=True)
class Event:
    """An Xid (number, as NVIDIA's table has it), or a halt of the GPU's system processor (None)."""

    bus: str
    number: int | None
    text: str


def read_events(reader: Reader) -> tuple[Event, ...] | Missing:
    """From the journal, else from dmesg. Missing where neither goes back to the start."""
    why = ""
    for arguments in (
        ("journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-monotonic"),
        ("dmesg", "--kernel"),
    ):
        output = reader.command(*arguments, seconds=30.0)
        if isinstance(output, Missing):
            why = output.reason
        elif output.status != 0:
            why = f"{arguments[0]}: {output.last_error}"
        elif (events := parse_events(output.text)) or from_the_start(output.text):
            return events
        else:
            why = f"{arguments[0]} does not go back to the start"
    return Missing(f"{why} (root and the groups adm and systemd-journal may read it)")


def from_the_start(text: str) -> bool:
    """Whether the first line with a time is of the boot's first second.

    The kernel's ring forgets, and a journal shows nothing to who may not read it.
    """
    times = (_TIME.match(line) for line in text.splitlines())
    first = next((time for time in times if time), None)
    return first is not None and float(first[1]) < _START_SECONDS


def parse_events(text: str) -> tuple[Event, ...]:
    """From lines of the kernel's log, whatever stands before `NVRM:` in them."""
    found = []
    for line in text.splitlines():
        xid = _XID.search(line)
        if xid is not None:
            found.append(Event(xid["bus"].lower(), int(xid["number"]), line.strip()))
        elif _GSP.search(line):
            found.append(Event("", None, line.strip()))
    return tuple(found)
