"""What sealed outputs say of their source, so that later stages need not be told it again.

Samples that were prepared from token ids, and states that were adopted from a dump, are followed
by every stage that needs them: the files they came from are not asked for again, and may be gone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.slate.files import sha256_file
from pipeline.slate.manifest import Manifest
from pipeline.slate.wipe import MANIFEST, read_marker

ADOPTED = "adopted"
_SOURCES = ("prepare.input", "prepare.prompts", "prepare.tokens", "prepare.answers")


def recorded_settings(output: Path) -> Mapping[str, Any]:
    """Settings that a sealed or begun output was made with; empty where there is none.

    NotSealed when its seal cannot be read.
    """
    if (output / MANIFEST).is_file():
        return Manifest.read(output).settings
    marker = read_marker(output) if output.is_dir() else None
    intent = marker.get("intent") if marker else None
    settings = intent.get("settings") if isinstance(intent, Mapping) else None
    return settings if isinstance(settings, Mapping) else {}


def is_adopted(output: Path) -> bool:
    """Whether an output of extract, sealed or begun, is of states from a dump."""
    return recorded_settings(output).get("engine") == ADOPTED


def recorded_tokens(output: Path, origins: Mapping[str, str]) -> Path | None:
    """The token ids that the output of prepare was made from, unless a command names a source."""
    if any(origins.get(key) == "override" for key in _SOURCES):
        return None
    tokens = recorded_settings(output).get("tokens")
    return Path(tokens["path"]) if isinstance(tokens, Mapping) else None


def unfinished_dump(output: Path) -> Path | None:
    """The dump of an adoption that was begun and is not sealed: whoever goes on reads it."""
    if (output / MANIFEST).is_file() or not is_adopted(output):
        return None
    return Path(recorded_settings(output)["dump"]["path"])


def tokens_identity(path: Path, *, output: Path) -> dict[str, str]:
    """Path and digest of a file of token ids, or of each in a folder.

    Of a file that is gone since `output` was sealed, what the seal says.
    """
    path = path.absolute()
    if not path.exists() and (output / MANIFEST).is_file():
        sealed = Manifest.read(output).settings.get("tokens")
        if isinstance(sealed, Mapping) and sealed.get("path") == str(path):
            return dict(sealed)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = {"path": str(path)}
    return found | {file.name: sha256_file(file) for file in files if file.is_file()}
