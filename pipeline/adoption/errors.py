"""Faults of adoption."""

from pipeline.faults import Fault


class AdoptionError(Fault):
    """A dump cannot be adopted as it is."""

    code = "CS-ADOPTION"
