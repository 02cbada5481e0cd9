"""A stand-in engine for tests: row i is a fixed function of the whole prefix x_0 .. x_i.

Any dropped, moved, repeated or swapped row shows. It fulfils the same contract as the real engines
and can be told to commit their faults.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.capture.contract import (
    Answer,
    GroupDone,
    Receipt,
    Refusal,
    Request,
    ids_digest,
)
from pipeline.capture.staging import Staging

_MODULUS = 2_147_483_647


@dataclass(frozen=True)
class StandInFaults:
    """Faults to commit. All off: the engine is right.

    prefix_cache: rows of a prefix that an earlier request had are left out. chunk_rows with
    last_chunk_only: only the last chunk's rows come. reorder: a group is answered backwards.
    late_seconds: the file appears that long after the receipt. dead_writer: files that never
    appear. refuse: ids always refused; refuse_once: refused at the first try. silent: never
    answered. swap_rows: the first two rows change places. not_finite, zero_row: in these samples.
    """

    prefix_cache: bool = False
    chunk_rows: int = 0
    last_chunk_only: bool = False
    reorder: bool = False
    late_seconds: float = 0.0
    dead_writer: frozenset[str] = frozenset()
    refuse: frozenset[str] = frozenset()
    refuse_once: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    wrong_ids: frozenset[str] = frozenset()
    not_finite: frozenset[str] = frozenset()
    zero_row: frozenset[str] = frozenset()
    swap_rows: frozenset[str] = frozenset()


def prefix_states(input_ids: Tensor, *, hidden_size: int, channels: int) -> Tensor:
    """States [channels, n, H] bf16 that depend on every token up to their row, and on the order."""
    value = 17
    rows = []
    for token in input_ids.tolist():
        value = (value * 48271 + token + 1) % _MODULUS
        rows.append(value)
    seeds = torch.tensor(rows, dtype=torch.float64)[None, :, None]
    channel = torch.arange(1, channels + 1, dtype=torch.float64)[:, None, None]
    position = torch.arange(1, hidden_size + 1, dtype=torch.float64)[None, None, :]
    return torch.sin(seeds * 1e-3 * channel + position).to(torch.bfloat16)


class StandIn:
    """The stand-in engine. head [V, H], when given, makes its log-probabilities."""

    def __init__(
        self,
        staging: Staging,
        *,
        hidden_size: int,
        taps: Sequence[int],
        head: Tensor | None = None,
        faults: StandInFaults | None = None,
    ) -> None:
        self._staging, self._hidden, self._taps = staging, hidden_size, tuple(taps)
        self._head, self._faults = head, faults or StandInFaults()
        self._groups: deque[Sequence[Request]] = deque()
        self._served = self._files = 0
        self._seen: list[list[int]] = []
        self._refused: set[str] = set()

    def submit(self, group: Sequence[Request]) -> None:
        """See `Engine.submit`."""
        self._groups.append(group)

    def answers(self) -> Iterator[Answer]:
        """See `Engine.answers`."""
        while True:
            group = self._groups.popleft()
            for request in reversed(group) if self._faults.reorder else group:
                if request.id not in self._faults.silent:
                    yield self._answer(request)
            # Counted before the answer: a caller may never come back to this generator.
            self._served += 1
            yield GroupDone(self._served - 1)

    def _answer(self, request: Request) -> Receipt | Refusal:
        faults = self._faults
        if request.id in faults.refuse_once and request.id not in self._refused:
            self._refused.add(request.id)
            return Refusal(request.id, "busy", "refused once, as told")
        if request.id in faults.refuse:
            return Refusal(request.id, "told_to", "refused, as told")
        ids = request.input_ids.clone()
        if request.id in faults.wrong_ids:
            ids[-1] += 1
        states = prefix_states(ids, hidden_size=self._hidden, channels=len(self._taps) + 1)
        first = self._cached(ids.tolist()) if faults.prefix_cache else 0
        chunk = faults.chunk_rows or len(ids)
        spans = [(a, min(a + chunk, len(ids))) for a in range(first, len(ids), chunk)]
        if faults.last_chunk_only:
            spans = spans[-1:]
        states = states[:, spans[0][0] :].clone()
        if request.id in faults.not_finite:
            states[0, -1, 0] = float("nan")
        if request.id in faults.zero_row:
            states[-1, 0] = 0
        logprobs = None
        if request.logprobs and self._head is not None:
            logprobs = _logprobs(states[-1], self._head, ids)
        if request.id in faults.swap_rows:
            states[:, [0, 1]] = states[:, [1, 0]]
        tensors = {f"tap_{k}": states[k].contiguous() for k in range(len(self._taps))}
        tensors |= {"final": states[-1].contiguous(), "input_ids": ids.to(torch.int32)}
        name = f"{self._files:06d}.safetensors"
        self._files += 1
        if request.id not in faults.dead_writer:
            self._write(name, tensors)
        return Receipt(
            request.id,
            states.shape[1],
            tuple(spans),
            ids_digest(ids),
            "bfloat16",
            self._taps,
            name,
            logprobs,
        )

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        if not self._faults.late_seconds:
            self._staging.write(name, tensors, timeout_seconds=60)
            return

        def late() -> None:
            (self._staging.folder / f".{name}.partial").write_bytes(b"half")
            time.sleep(self._faults.late_seconds)
            self._staging.write(name, tensors, timeout_seconds=60)

        threading.Thread(target=late, daemon=True).start()

    def _cached(self, ids: list[int]) -> int:
        longest = 0
        for seen in self._seen:
            same = 0
            while same < min(len(seen), len(ids) - 1) and seen[same] == ids[same]:
                same += 1
            longest = max(longest, same)
        self._seen.append(ids)
        return longest


def _logprobs(final: Tensor, head: Tensor, ids: Tensor) -> tuple[float, ...]:
    scores = torch.log_softmax(final[:-1].float() @ head.float().T, dim=-1)
    return tuple(scores.gather(1, ids[1:, None].long())[:, 0].tolist())
