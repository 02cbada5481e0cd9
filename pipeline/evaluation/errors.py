"""Faults of the evaluation."""

from pipeline.faults import Fault


class EvaluationError(Fault):
    """A drafter could not be measured on a target."""

    code = "CS-EVALUATION"


class WrongDrafter(EvaluationError):
    """The drafter was not made for this target."""

    code = "CS-WRONG-DRAFTER"


class UnsupportedTarget(EvaluationError):
    """The target's cache cannot be taken back after a rejected draft."""

    code = "CS-TARGET-CACHE"
