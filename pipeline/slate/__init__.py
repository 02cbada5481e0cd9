"""The slate: what makes a stage a stage.

Owns the stage protocol (lock, checks, wipe, run, verify, seal), ownership markers, manifests, logs,
progress and the child processes that a stage starts. Promises that an output directory is either
sealed and whole or not sealed at all, and that nothing without this project's marker is deleted.
May import host, settings and faults.
"""
