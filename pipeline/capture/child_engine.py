"""The parent's side of an engine that runs in a child process."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.capture.contract import Answer, GroupDone, Receipt, Refusal, Request
from pipeline.capture.errors import CaptureError
from pipeline.slate.child import Child


class ChildEngine:
    """Fulfils the engine contract over a child's JSON lines.

    numbers: sample id -> its number among the prepared samples. Waits until the child is ready.
    """

    def __init__(self, child: Child, *, numbers: Mapping[str, int]) -> None:
        self._child, self._numbers = child, numbers
        self._events = child.events()
        first = next(self._events)
        if first.get("event") != "ready":
            raise _unknown(first)

    def submit(self, group: Sequence[Request]) -> None:
        """See `Engine.submit`."""
        self._child.send(
            {
                "samples": [self._numbers[request.id] for request in group],
                "logprobs": [self._numbers[request.id] for request in group if request.logprobs],
            }
        )

    def answers(self) -> Iterator[Answer]:
        """See `Engine.answers`. ChildFailed when the child dies."""
        for event in self._events:
            kind = event.pop("event", None)
            if kind == "group":
                yield GroupDone(event["number"])
            elif kind == "refusal":
                yield Refusal(**event)
            elif kind == "receipt":
                event["spans"] = tuple((start, end) for start, end in event["spans"])
                event["taps"] = tuple(event["taps"])
                if event["logprobs"] is not None:
                    event["logprobs"] = tuple(event["logprobs"])
                yield Receipt(**event)
            else:
                raise _unknown({"event": kind, **event})


def _unknown(event: Mapping[str, Any]) -> CaptureError:
    return CaptureError(
        f"the engine's process sent {dict(event)!r:.200}",
        wanted="ready, receipt, refusal or group",
        next_step="this is a fault of the engine: please report it with the log",
    )
