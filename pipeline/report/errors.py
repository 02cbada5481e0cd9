"""Faults of the report."""

from pipeline.faults import Fault


class ReportError(Fault):
    """The facts of a run cannot be shown as they are."""

    code = "CS-REPORT"
