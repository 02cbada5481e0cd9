"""Resource limits of a session of the run user, from /proc/self/limits."""

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.host.reader import Missing, Reader

_PATH = "/proc/self/limits"
_NAMES = {"Max locked memory": "memlock", "Max stack size": "stack", "Max open files": "nofile"}
_VALUE = re.compile("unlimited|[0-9]{1,20}")


@dataclass(frozen=True)
class Limits:
    """Soft limits by name (memlock and stack in bytes, nofile); None: unlimited. of: whose."""

    of: str
    soft: Mapping[str, int | None]


def read_limits(reader: Reader, user: str | None) -> Limits | Missing:
    """Of a session of `user`: this process where it is that user's (or user is None).

    Root opens a session of the user's own; anybody else cannot know.
    """
    own = _own_name()
    if user is None or own == user:
        text = reader.text(_PATH)
        return text if isinstance(text, Missing) else parse_limits(text, of=own)
    if os.geteuid() != 0:
        return Missing(f"run as {own}: only {user} and root can see the limits of {user}")
    output = reader.command("runuser", "-u", user, "--", "cat", _PATH)
    if isinstance(output, Missing):
        return output
    if output.status != 0:
        return Missing(f"runuser -u {user}: {output.last_error}")
    return parse_limits(output.text, of=user)


def parse_limits(text: str, *, of: str) -> Limits | Missing:
    """From the text of /proc/PID/limits."""
    soft: dict[str, int | None] = {}
    for line in text.splitlines():
        for label, name in _NAMES.items():
            if line.startswith(label):
                value, *_ = [*line.removeprefix(label).split(), ""]
                if _VALUE.fullmatch(value):
                    soft[name] = None if value == "unlimited" else int(value)
    if len(soft) != len(_NAMES):
        return Missing(f"{_PATH}: no {', '.join(sorted(set(_NAMES.values()) - set(soft)))}")
    return Limits(of, soft)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # in a container, a caller's id that has no name there
        return str(os.geteuid())
