"""Faults of the host."""

from pipeline.faults import Fault


class HostError(Fault):
    """What a ready host is cannot be read, or this host is not ready."""

    code = "CS-HOST-FILE"


class HostNotReady(HostError):
    """This host is not as its file wants it; each finding has a HOST code of its own."""

    code = "CS-HOST-NOT-READY"
