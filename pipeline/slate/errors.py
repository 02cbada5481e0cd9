"""Faults of the slate."""

from pipeline.faults import Fault


class SlateError(Fault):
    """A stage cannot start, run or be sealed."""


class WipeRefused(SlateError):
    """A directory that must not be deleted was named for a wipe."""


class LockHeld(SlateError):
    """Another process works on the same run."""


class NotSealed(SlateError):
    """An output is absent, unfinished or does not match its manifest."""


class ChildFailed(SlateError):
    """A process that a stage started ended badly or in silence."""
