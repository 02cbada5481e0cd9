"""The samples that requests are matched with: by length, and near the place that a number hints."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from threading import Lock

import torch
from torch import Tensor

from pipeline.store.index import Entry
from pipeline.store.reader import PreparedSamples

_NEAR = 16  # samples around a request's number that it may be a part of


class Book:
    """All prepared samples. Index: place in prepared order. Safe for threads.

    Ids and masks of the lengths that were asked for stay in memory: 5 bytes a token.
    """

    def __init__(self, samples: PreparedSamples) -> None:
        self._samples = samples
        self.entries: tuple[Entry, ...] = samples.entries
        self._by_length: dict[int, list[int]] = defaultdict(list)
        for index, entry in enumerate(self.entries):
            self._by_length[entry.length].append(index)
        self._stacks: dict[int, tuple[Tensor, Tensor]] = {}
        self._lock = Lock()

    def of_length(self, length: int) -> list[int]:
        """Indexes of the samples of exactly this length, rising."""
        return self._by_length.get(length, [])

    def nearest(self, length: int, number: int) -> Iterator[int]:
        """Places in `of_length`, those nearest to an index first."""
        bucket = self.of_length(length)
        right = bisect_left(bucket, number)
        left = right - 1
        while left >= 0 or right < len(bucket):
            if left < 0 or (
                right < len(bucket) and bucket[right] - number <= number - bucket[left]
            ):
                yield right
                right += 1
            else:
                yield left
                left -= 1

    def longer_near(self, length: int, number: int) -> list[int]:
        """Indexes around `number` of samples that have more than `length` tokens."""
        near = range(max(0, number - _NEAR), min(len(self.entries), number + _NEAR + 1))
        return [index for index in near if self.entries[index].length > length]

    def ids(self, index: int) -> Tensor:
        """Token ids of a sample, int32 [n]."""
        return self._samples.read(self.entries[index]).input_ids

    def supervised(self, index: int) -> Tensor:
        """Supervised flags of a sample, bool [n]."""
        return self._samples.read(self.entries[index]).supervised

    def stack(self, length: int) -> tuple[Tensor, Tensor]:
        """Ids int32 [C, n] and flags bool [C, n] of all samples of a length."""
        with self._lock:
            if length not in self._stacks:
                read = [self._samples.read(self.entries[i]) for i in self.of_length(length)]
                self._stacks[length] = (
                    torch.stack([sample.input_ids for sample in read]),
                    torch.stack([sample.supervised for sample in read]),
                )
            return self._stacks[length]

    def shared(self, index: int) -> int:
        """How many first tokens a sample shares with its neighbours or others of its length.

        Rows of a common system prompt are alike in all requests, and prove nothing.
        """
        ids = self.ids(index)
        found = [0]
        for other in (index - 1, index + 1):
            if 0 <= other < len(self.entries):
                its = self.ids(other)
                size = min(len(ids), len(its))
                found.append(int((ids[:size] == its[:size]).int().cumprod(0).sum()))
        same = (self.stack(len(ids))[0] == ids).int().cumprod(1).sum(1)
        same[self.of_length(len(ids)).index(index)] = 0
        return max(*found, int(same.max()))
