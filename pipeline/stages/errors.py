"""Faults of the stages."""

from pipeline.faults import Fault


class StageError(Fault):
    """A stage found inputs or results that it must not accept."""

    code = "CS-STAGE"


class TooFew(StageError):
    """Fewer records, samples or prompts are left than the settings allow."""

    code = "CS-TOO-FEW"


class NotProven(StageError):
    """An output does not pass the proof that the stage makes of it; nothing was sealed."""

    code = "CS-NOT-PROVEN"


class ServerUnfit(StageError):
    """The SGLang server is not installed, or does not run as the settings say."""

    code = "CS-SGLANG"


class TooLow(StageError):
    """The drafter is accepted less than evaluate.least_acceptance_length wants."""

    code = "CS-ACCEPTANCE"
