"""Faults of the slate."""

from pipeline.faults import Fault


class SlateError(Fault):
    """A stage cannot start, run or be sealed."""

    code = "CS-RUN-FOLDER"


class DiskFault(SlateError):
    """A disk is full, broken or may not be written."""

    code = "CS-DISK"


class WipeRefused(SlateError):
    """A directory that must not be deleted was named for a wipe."""

    code = "CS-WIPE-REFUSED"


class LockHeld(SlateError):
    """Another process works on the same run."""

    code = "CS-LOCK-HELD"


class NotSealed(SlateError):
    """An output is absent, unfinished or does not match its manifest."""

    code = "CS-NOT-SEALED"


class ChildFailed(SlateError):
    """A process that a stage started ended badly or in silence."""

    code = "CS-CHILD"


class GpusBusy(SlateError):
    """A GPU that a stage wants is absent, or something holds its memory."""

    code = "CS-GPUS-BUSY"


class Damaged(NotSealed):
    """A sealed output, or its manifest, was changed after the seal."""

    code = "CS-DAMAGED"


class OtherIntent(NotSealed):
    """An output was made, or begun, from other settings or inputs than the present ones."""

    code = "CS-OTHER-SETTINGS"
