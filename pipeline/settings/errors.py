"""Faults of the settings."""

from pipeline.faults import Fault


class SettingsError(Fault):
    """A profile or an override does not give valid settings."""

    code = "CS-SETTINGS"
