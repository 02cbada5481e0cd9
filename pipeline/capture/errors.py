"""Faults of capture."""

from pipeline.faults import Fault


class CaptureError(Fault):
    """The engine or the staging folder does not do what the contract says."""


class ServerDied(CaptureError):
    """The SGLang server, or one of its ranks, ended by itself."""
