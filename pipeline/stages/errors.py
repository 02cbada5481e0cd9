"""Faults of the stages."""

from pipeline.faults import Fault


class StageError(Fault):
    """A stage found inputs or results that it must not accept."""
