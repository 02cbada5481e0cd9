"""Which rows of a forward batch belong to which request, and whether they can be believed.

A forward batch holds rows of several requests one after the other: whole prompts, chunks of long
ones, single rows of requests that already decode. Every captured request must arrive in contiguous
spans from position 0 to its end. What is decided here needs no device data; the comparison of the
token ids that ran, and of the values, is the writer's.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class BatchRequest(Protocol):
    """What is read of SGLang's `Req` (managers/schedule_batch.py, 0.5.17 to 0.5.23)."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(frozen=True)
class Refused:
    """Why a request is not captured: a stable code and a sentence with both values."""

    reason: str
    detail: str


@dataclass(eq=False)
class CapturedRequest:
    """A request on its way. ids int32 [n]; spans so far, half open; next: the position wanted."""

    rid: str
    ids: NDArray[np.int32]
    seen_at: float
    spans: list[tuple[int, int]] = field(default_factory=list)
    next: int = 0
    refused: Refused | None = None

    @property
    def rows(self) -> int:
        """Rows taken so far."""
        return sum(end - start for start, end in self.spans)

    @property
    def file(self) -> str:
        """Name of its staging file."""
        return f"{self.rid}.safetensors"

    def refuse(self, reason: str, detail: str) -> None:
        """Records why it is refused; the first reason stays."""
        self.refused = self.refused or Refused(reason, detail)


@dataclass(frozen=True)
class Slot:
    """A captured request's part of one forward batch.

    first_row: where its rows begin in the batch. position: of the first of them in the request.
    last: the request's end is among them. restarted: an earlier pass of the same request, now void.
    """

    request: CapturedRequest
    first_row: int
    position: int
    rows: int
    last: bool
    restarted: CapturedRequest | None = None


class RequestStates:
    """All requests that have begun and not ended, in one scheduler process."""

    def __init__(self, *, rid_prefix: str) -> None:
        self._prefix = rid_prefix
        self._open: dict[str, CapturedRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def plan(
        self,
        requests: Sequence[BatchRequest],
        prefix_lengths: Sequence[int],
        extend_lengths: Sequence[int],
        *,
        wrong: Refused | None,
        now: float,
    ) -> list[Slot | None]:
        """What to do with each request of a forward batch; None where there is nothing to do.

        Rows of a request: [prefix, prefix + extend) of its own positions. wrong: what is the matter
        with the batch as a whole. now: monotonic seconds. A request whose end is in the batch is
        forgotten here; its slot carries it to the end.
        """
        slots: list[Slot | None] = []
        row = 0
        for request, prefix, extend in zip(requests, prefix_lengths, extend_lengths, strict=True):
            slots.append(self._slot(request, row, prefix, extend, wrong, now))
            row += extend
        return slots

    def _slot(
        self,
        request: BatchRequest,
        row: int,
        prefix: int,
        extend: int,
        wrong: Refused | None,
        now: float,
    ) -> Slot | None:
        # A prefix behind the prompt is the decode row of a mixed batch.
        if not request.rid.startswith(self._prefix) or prefix >= len(request.origin_input_ids):
            return None
        known = self._open.get(request.rid)
        restarted = known if prefix == 0 else None
        if known is None or prefix == 0:
            ids = np.asarray(request.origin_input_ids, dtype=np.int32)
            known = self._open[request.rid] = CapturedRequest(request.rid, ids, now)
        known.seen_at = now
        end = prefix + extend
        if wrong is not None:
            known.refuse(wrong.reason, wrong.detail)
        if len(request.output_ids):
            count = len(request.output_ids)
            known.refuse("retracted", f"prefilled again after {count} tokens had been written")
        if prefix > known.next:
            known.refuse("prefix_cache", f"rows [{known.next}, {prefix}) came from the cache")
        elif prefix < known.next:
            known.refuse("row_count", f"row {prefix} ran again, wanted row {known.next}")
        if known.refused is None:
            known.spans.append((prefix, end))
        known.next = end
        last = end >= len(known.ids)
        if last:
            del self._open[request.rid]
        return Slot(known, row, prefix, extend, last, restarted)

    def abandoned(self, *, now: float, after_seconds: float) -> list[CapturedRequest]:
        """Takes out the requests whose next chunk has not come: their clients went away."""
        late = [known for known in self._open.values() if now - known.seen_at > after_seconds]
        for known in late:
            del self._open[known.rid]
        return late


def make_receipt(request: CapturedRequest, *, origin: dict[str, Any]) -> dict[str, Any]:
    """The receipt of a request whose end has run. origin: taps, rank, plugin and sglang."""
    if request.refused is None and request.rows != len(request.ids):
        request.refuse("row_count", f"{request.rows} rows for {len(request.ids)} tokens")
    refused = request.refused
    return {
        "rid": request.rid,
        "ok": refused is None,
        "reason": refused.reason if refused else None,
        "detail": refused.detail if refused else None,
        "rows": request.rows,
        "spans": [list(span) for span in request.spans],
        "ids_sha256": hashlib.sha256(request.ids.astype("<i4").tobytes()).hexdigest(),
        "dtype": "bfloat16",
        "file": request.file,
        **origin,
    }
