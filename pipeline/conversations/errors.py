"""The faults of this room.

ConversationError (a Fault)
├── SourceError        a conversations file cannot be opened or is none of the known kinds
└── RendererError      the tokenizer cannot render at all (no template, nothing that ends a turn)

A single record that cannot be used is no fault: it is a Skip (normalise.py), counted by reason.
"""

from pathlib import Path
from typing import NoReturn

from pipeline.faults import Fault


class ConversationError(Fault):
    """Base of every fault that this room raises."""

    code = "CS-ANSWERS"


class SourceError(ConversationError):
    """A conversations file that cannot be read as a whole: missing, a folder, no known kind."""

    code = "CS-CONVERSATIONS"


class RendererError(ConversationError):
    """A tokenizer or a renderer setting with which no conversation at all could be rendered."""

    code = "CS-TEMPLATE"


def lost(
    path: Path,
    what: str,
    error: Exception | None,
    *,
    next_step: str = "check the path; if the file was copied or downloaded, do that again",
) -> NoReturn:
    """Raise the SourceError of a file of which the whole, or the rest, cannot be had."""
    raise SourceError(
        f"{path} {what}",
        wanted="a whole, readable file of conversations",
        next_step=next_step,
    ) from error
