"""Faults of capture."""

from pipeline.faults import Fault


class CaptureError(Fault):
    """The engine or the staging folder does not do what the contract says."""

    code = "CS-CAPTURE"


class ServerDied(CaptureError):
    """The SGLang server, or one of its ranks, ended by itself."""

    code = "CS-SERVER-DIED"


class StagingFull(CaptureError):
    """The staging folder has no room for what an engine wants to write."""

    code = "CS-STAGING"
