"""The store: sealed shards of samples and of their states on disk, and reading them back fast.

Owns the shard format (safetensors, laid out beforehand, written row by row, renamed when whole),
its index and digests. Promises that a reader sees only whole shards whose header is exactly the one
that the writer would write, and that files are mapped, never unpickled.
May import slate, settings and faults.
"""
