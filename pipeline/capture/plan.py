"""Which samples go into which shard and which batch: a function of the prepared samples alone.

A resumed run plans the same shards and the same batches as an uninterrupted one, so that it
computes the same bits.
"""

from collections.abc import Sequence

from pipeline.store.index import Entry


def plan_shards(entries: Sequence[Entry], *, row_bytes: int, shard_bytes: int) -> list[list[Entry]]:
    """Cuts the samples, in order, into shards of at most shard_bytes (or one larger sample)."""
    shards: list[list[Entry]] = []
    size = 0
    for entry in entries:
        needed = entry.length * row_bytes
        if not shards or size + needed > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += needed
    return shards


def plan_batches(entries: Sequence[Entry], *, batch_tokens: int) -> list[list[Entry]]:
    """Groups one shard's samples by length, so that a batch pads little.

    A batch has at most batch_tokens padded tokens, or one longer sample.
    """
    batches: list[list[Entry]] = []
    for entry in sorted(entries, key=lambda entry: (-entry.length, entry.id)):
        # Sorted downwards, the first sample of a batch is the longest: all are padded to it.
        if batches and batches[-1][0].length * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(entry)
        else:
            batches.append([entry])
    return batches
