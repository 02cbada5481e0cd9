"""Which samples are held out, decided by what was asked and not by chance."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.store.writer import SampleWriter, to_sample

_BUFFERED = 256  # samples that wait until it is known whether one of them is held out


@dataclass(frozen=True)
class _Waiting:
    question: bytes
    input_ids: Sequence[int]
    supervised: Sequence[bool]


class SplitWriter:
    """Writes samples with their split, in order, dropping repeats, and counts supervised tokens.

    A sample is held out when the digest of its question falls into the held-out share, so equal
    questions are always on one side. When none of the first samples does, the one with the lowest
    digest (and its equals) is taken, so that there always is one. counts int64 [V] grows by the
    supervised tokens of training samples.
    """

    def __init__(self, writer: SampleWriter, *, held_out_share: float, counts: Tensor) -> None:
        self._writer, self._counts = writer, counts
        self._limit = int(held_out_share * 2**64).to_bytes(9, "big")[1:]
        self._forced: bytes | None = None
        self._waiting: list[_Waiting] | None = []
        self._seen: set[bytes] = set()
        self.kept = 0

    def add(self, *, question: str, input_ids: Sequence[int], supervised: Sequence[bool]) -> bool:
        """Takes one sample of n > 0 ids; False, and not taken, when it repeats earlier ids."""
        ids = torch.tensor(input_ids, dtype=torch.int32)
        digest = hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        asked = hashlib.sha256(question.encode()).digest()[:8]
        sample = _Waiting(asked, input_ids, supervised)
        if self._waiting is None:
            self._write(sample)
            return True
        self._waiting.append(sample)
        if len(self._waiting) >= _BUFFERED:
            self._release()
        return True

    def finish(self) -> None:
        """Writes what waits."""
        self._release()
        self._writer.flush()

    def _release(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        questions = {sample.question for sample in waiting}
        if len(questions) > 1 and all(question >= self._limit for question in questions):
            self._forced = min(questions)
        for sample in waiting:
            self._write(sample)

    def _write(self, sample: _Waiting) -> None:
        held_out = sample.question < self._limit or sample.question == self._forced
        written = to_sample(
            f"s-{self.kept:07d}",
            sample.input_ids,
            supervised=sample.supervised,
            split="held_out" if held_out else "train",
        )
        if not held_out:
            tokens = written.input_ids[written.supervised].long()
            self._counts += torch.bincount(tokens, minlength=len(self._counts))
        self._writer.add(written)
        self.kept += 1
