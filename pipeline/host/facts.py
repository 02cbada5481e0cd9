"""What this host and this installation are, for manifests and reports."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = (
    "cleanslate",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "pyarrow",
)


def host_facts() -> dict[str, Any]:
    """Kernel, processor, cores, memory and interpreter, as JSON."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": psutil.virtual_memory().total >> 20,
        "python": platform.python_version(),
    }


def versions() -> dict[str, str | None]:
    """Installed versions of the packages whose behaviour shows in the outputs."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def source_commit(folder: Path) -> str | None:
    """Git commit of the source tree, with `+changes` where files differ; None outside git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
