"""What the plugin is told: one JSON file, named by the environment variable CLEANSLATE_CAPTURE."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SUPPORTED_SGLANG = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")


class PluginError(Exception):
    """The plugin cannot do its work in this server; the message says what was found and wanted."""


@dataclass(frozen=True)
class CaptureConfiguration:
    """What to capture and where to put it.

    staging: folder of the finished files. quota_bytes: most that may wait there, over all writing
    ranks; at least four times the largest request for every rank that writes, or requests that are
    half written could wait for each other. taps: layer numbers; tap k is the input of decoder layer
    k. rid_prefix: only requests whose id begins so are captured. ring_bytes: pinned memory between
    the GPU and the writers, a power of two (torch rounds pinned blocks up to one).
    timeout_seconds: longest wait for room in the ring or in the folder; keep it under the server's
    --watchdog-timeout, which kills a scheduler whose forward takes longer.
    """

    staging: Path
    quota_bytes: int
    taps: tuple[int, ...]
    rid_prefix: str
    ring_bytes: int
    writer_threads: int
    timeout_seconds: float

    @classmethod
    def read(cls, path: Path) -> "CaptureConfiguration":
        """Reads the JSON file. PluginError for a missing, unknown or impossible value."""
        try:
            values: Any = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise PluginError(f"{path}: {error}; wanted the capture's JSON file") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            found = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise PluginError(f"{path} holds {found}; wanted exactly {sorted(names)}")
        read = cls(**{**values, "staging": Path(values["staging"]), "taps": tuple(values["taps"])})
        if not read.staging.is_dir():
            raise PluginError(f"staging {read.staging} is no folder; wanted an existing one")
        # Tap 0, the embedding, dies in SGLang's own forward (0.5.17 llama.py: no residual yet).
        if not read.taps or list(read.taps) != sorted(set(read.taps)) or read.taps[0] < 1:
            raise PluginError(f"taps {list(read.taps)}; wanted strictly rising layers from 1 on")
        if not read.rid_prefix:
            raise PluginError("rid_prefix is empty; wanted one that no other request begins with")
        for name in ("quota_bytes", "ring_bytes", "writer_threads", "timeout_seconds"):
            if getattr(read, name) <= 0:
                raise PluginError(f"{name} is {getattr(read, name)}; wanted more than 0")
        return read


def check_version(sglang: str) -> None:
    """PluginError for a version of SGLang that the plugin was not written for."""
    if sglang not in SUPPORTED_SGLANG:
        raise PluginError(f"SGLang {sglang}; wanted one of {', '.join(SUPPORTED_SGLANG)}")
