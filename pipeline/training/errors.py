"""Faults of training."""

from pipeline.faults import Fault


class TrainingError(Fault):
    """Training cannot start or go on."""

    code = "CS-TRAIN"


class RequestError(TrainingError):
    """A value of the request is impossible, or its parts do not fit each other."""

    code = "CS-TRAIN-SETTINGS"


class NothingToTrain(TrainingError):
    """No training sample holds a supervised token that a row could be asked for."""

    code = "CS-TRAIN-NOTHING"


class NonFinite(TrainingError):
    """A loss or gradient is infinite or not a number; the weights were not touched."""

    code = "CS-TRAIN-NONFINITE"


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, or is broken."""

    code = "CS-CHECKPOINT"


class ResumeRefused(CheckpointError):
    """A checkpoint belongs to other data or other settings."""

    code = "CS-RESUME"


class RankError(TrainingError):
    """Another rank stopped, or cannot be reached."""

    code = "CS-RANK"


class LostPeers(RankError):
    """The connection to the other ranks broke; which of them ended, and how, is not known here."""
