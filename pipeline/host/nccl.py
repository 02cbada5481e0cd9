"""NCCL's variables of this host, as the playbook wrote them for stages."""

from collections.abc import Mapping
from typing import Any

from pipeline.host.reader import Missing, Reader
from pipeline.settings.strict_json import parse_json

FILE = "/etc/cleanslate/nccl.json"
_ABSENT = object()


def read_nccl(reader: Reader) -> Any | Missing:
    """The value of the file; invalid JSON is a Missing like an absent file."""
    text = reader.text(FILE)
    if isinstance(text, Missing):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        return Missing(f"{FILE} is no JSON: {error}")


def difference(wanted: Mapping[str, Mapping[str, str]], found: Any | Missing) -> str:
    """What the file has that is not exactly what is wanted, with names; empty where it is."""
    if isinstance(found, Missing):
        return found.reason
    if found == wanted:
        return ""
    if not isinstance(found, dict):
        return f"holds {type(found).__name__}"
    return f"other values of {', '.join(_names(wanted, found))}"


def _names(wanted: Mapping[str, Mapping[str, str]], found: Mapping[str, Any]) -> list[str]:
    """Uses that differ, with the variable where both sides have a map of them."""
    names = []
    for use in sorted({*wanted, *found}):
        if use not in wanted or not isinstance(found.get(use), dict):
            names.append(use)
            continue
        ours, theirs = wanted[use], found[use]
        for name in sorted({*ours, *theirs}):
            if ours.get(name, _ABSENT) != theirs.get(name, _ABSENT):
                names.append(f"{use}.{name}")
    return names
