"""Faults of the containers."""

from pipeline.faults import Fault


class ContainerError(Fault):
    """A stage cannot run in a container as its settings are, or the images are not there."""

    code = "CS-CONTAINER"
