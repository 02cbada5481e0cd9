"""Debian packages by dpkg-query: version, whether installed, whether held."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.host.reader import Missing, Reader

_FORMAT = r"${db:Status-Abbrev}|${Package}|${Version}\n"


@dataclass(frozen=True)
class Package:
    """held: an upgrade leaves it alone (apt-mark hold)."""

    name: str
    version: str
    held: bool


def read_packages(reader: Reader, names: Iterable[str]) -> Mapping[str, Package] | Missing:
    """Those of `names` that are installed. Missing without dpkg."""
    output = reader.command("dpkg-query", "--show", f"--showformat={_FORMAT}", *names)
    if isinstance(output, Missing):
        return output
    if output.status not in (0, 1):  # 1: some of them are not known to it
        return Missing(f"dpkg-query: {output.last_error}")
    return parse_packages(output.text)


def parse_packages(text: str) -> Mapping[str, Package]:
    """From lines `ii |name|version`: wanted state, then present state."""
    found = {}
    for line in text.splitlines():
        state, _, rest = line.partition("|")
        name, _, version = rest.partition("|")
        if state[1:2] == "i":
            found[name] = Package(name, version, held=state[0] == "h")
    return found


def upstream(version: str) -> str:
    """Of a Debian version, the part that upstream chose: 580.95.05 of 1:580.95.05-1."""
    return version.rpartition(":")[2].rpartition("-")[0] or version.rpartition(":")[2]
