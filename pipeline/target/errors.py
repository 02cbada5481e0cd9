"""The faults of this room.

TargetError (a Fault)
├── WheelError         a wheel cannot be fetched, is not the pinned one, or lacks a member
├── GgufError          a GGUF file is broken or of a kind that is not converted
├── WeightMismatch     converted weights differ from an independent dequantisation
├── FolderError        a model folder lacks or contradicts something
│   └── TensorError    embedding or head cannot be read for certain
└── RemoteCodeRefused  a folder brings its own code and the profile does not allow it
"""

from pipeline.faults import Fault


class TargetError(Fault):
    """Base of every fault that this room raises."""


class WheelError(TargetError):
    """A wheel that cannot be fetched, is not the pinned one, or lacks a wanted member."""

    code = "CS-WHEEL"


class GgufError(TargetError):
    """A GGUF file that is broken or of a kind that is not converted."""

    code = "CS-GGUF"


class WeightMismatch(TargetError):
    """Converted weights that are not the dequantised ones."""

    code = "CS-GGUF-MISMATCH"


class FolderError(TargetError):
    """A model folder that lacks something or contradicts itself."""

    code = "CS-TARGET-FOLDER"


class TensorError(FolderError):
    """An embedding or a head that cannot be read for certain."""

    code = "CS-TARGET-TENSOR"


class RemoteCodeRefused(TargetError):
    """A folder that brings its own code where the profile does not allow it."""

    code = "CS-REMOTE-CODE"
