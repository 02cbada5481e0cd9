"""Faults of the host."""

from pipeline.faults import Fault


class HostError(Fault):
    """What a ready host is cannot be read, or this host is not ready."""
