"""The run's settings: strict, typed, from a profile and overrides, each value with its origin.

Owns the profile format and the environment that child processes get. May import faults.
"""
