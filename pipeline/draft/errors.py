"""Faults of the draft room.

DraftError
 +-- ConfigError      a drafter that cannot be built or that a server would not run
 +-- VocabularyError  a draft vocabulary that is broken or does not fit
 +-- PackError        a packed batch whose tensors do not belong together
 +-- ExportError      an exported drafter that is incomplete, has extra names or broken values
"""

from pipeline.faults import Fault


class DraftError(Fault):
    """Base of every fault of this room."""


class ConfigError(DraftError):
    """The sizes of a drafter contradict each other or the target."""

    code = "CS-DRAFT-SHAPE"


class VocabularyError(DraftError):
    """A draft vocabulary is broken, or does not fit the target or the drafter."""

    code = "CS-DRAFT-VOCABULARY"


class PackError(DraftError):
    """The tensors of a pack do not fit each other."""

    code = "CS-DRAFT-PACK"


class ExportError(DraftError):
    """An exported drafter misses names, has extra ones, or holds broken values."""

    code = "CS-EXPORT"
