"""Faults of the store."""

from pipeline.faults import Fault


class StoreError(Fault):
    """A shard or its index cannot be written or believed."""

    code = "CS-STORE"


class ShardDamaged(StoreError):
    """A sealed shard differs from its index."""

    code = "CS-STORE-DAMAGED"
