"""The same settings, as they are true inside a container."""

import json
from pathlib import Path
from typing import Any

from pipeline.settings.load import PATH_KEYS, plain_absolute
from pipeline.settings.model import Settings

PYTHON = Path("/opt/cleanslate/bin/python")  # of the virtual environment, in every image
OURS = Path("/run/cleanslate")  # where a container finds what the launcher lends it
HOST_FILE = OURS / "host.yml"
_HOST = "run.host"
_SERVER_PYTHON = "extract.server.python"
_GPU_KEYS = ("prepare.answering.gpus", "extract.gpus", "train.gpus", "evaluate.gpus")


def inside_overrides(settings: Settings) -> list[str]:
    """Overrides, `key=value`, for the command line in a container.

    Paths that are relative to the caller's folder become absolute; GPUs are numbered from 0, as a
    container sees only its own; SGLang is in the image; what a ready host is, is lent.
    """
    found = [f"{_SERVER_PYTHON}={PYTHON}"]
    if settings.run.host:
        found.append(f"{_HOST}={HOST_FILE}")
    lent = (_SERVER_PYTHON, _HOST)
    for keys in PATH_KEYS:
        value, key = value_of(settings, keys), ".".join(keys)
        if isinstance(value, Path) and not value.is_absolute() and key not in lent:
            plain = str(plain_absolute(value))
            found.append(f"{key}={json.dumps(plain, ensure_ascii=False)}")
    for key in _GPU_KEYS:
        if gpus := value_of(settings, key.split(".")):
            found.append(f"{key}={list(range(len(gpus)))}")
    return found


def value_of(settings: Any, keys: Any) -> Any:
    """The value of a setting by its keys; None where the section has no such key."""
    for key in keys:
        settings = getattr(settings, key, None)
    return settings
