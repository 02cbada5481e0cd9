"""NCCL on this host: which of its variables make the stages' own messages fast, and right.

Owns the sweep (`tune`), the processes it starts, and the file of its winners, from which stages
take their environment (`profile`). Promises that every sum was compared with the exact one, that no
attempt lasts for ever, and that nothing is recommended which was not faster here by more than the
spread of the measurement. May import slate, host, settings.environment and faults.
"""
