"""The NVIDIA kernel module that is loaded, from /proc/driver/nvidia/version."""

import re
from dataclasses import dataclass

from pipeline.host.reader import Missing, Reader

_PATH = "/proc/driver/nvidia/version"
_LINE = re.compile(
    r"^NVRM version: NVIDIA (?P<flavour>.*?)\s+(?P<version>[0-9]{1,9}(\.[0-9]+)+)(\s|$)", re.M
)


@dataclass(frozen=True)
class Module:
    """version: as `580.95.05`. open: the open kernel modules, which Blackwell wants."""

    version: str
    open: bool

    @property
    def branch(self) -> int:
        """The version's first number."""
        return int(self.version.partition(".")[0])


def read_module(reader: Reader) -> Module | Missing:
    """The loaded module. Missing when none is."""
    text = reader.text(_PATH)
    return text if isinstance(text, Missing) else parse_module(text)


def parse_module(text: str) -> Module | Missing:
    """From the text of the file."""
    found = _LINE.search(text)
    if found is None:
        return Missing(f"{_PATH}: no version in {text.strip()[:80]!r}")
    return Module(found["version"], "Open Kernel Module" in found["flavour"])
