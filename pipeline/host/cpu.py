"""Frequency governors of the cores."""

from collections.abc import Mapping

from pipeline.host.reader import Missing, Reader

_FOLDER = "/sys/devices/system/cpu"


def read_governors(reader: Reader) -> Mapping[str, str] | Missing:
    """Core to governor, of the cores that have one. Missing where none has."""
    names = reader.names(_FOLDER)
    if isinstance(names, Missing):
        return names
    found = {}
    for name in names:
        if name.startswith("cpu") and name[3:].isdigit():
            text = reader.text(f"{_FOLDER}/{name}/cpufreq/scaling_governor")
            if not isinstance(text, Missing):
                found[name] = text.strip()
    return found or Missing("no core has a frequency governor (a virtual machine?)")
