"""A chat template is a program out of the target's folder: run in transformers' sandbox, in bounds.

The sandbox keeps it from files, modules and attributes; nothing there keeps it from counting for
ever, or from asking for a string of ten gigabytes. Here both end in a RendererError.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pipeline.conversations.bounds import limited_memory
from pipeline.conversations.errors import RendererError

SECONDS = 10.0
"""Longest run for one conversation; a usual template takes some thousandths of one."""
ROOM_BYTES = 1 << 30
"""Most memory that it may ask for."""


class _Overrun(BaseException):
    """Time is up; no `except Exception` of Jinja's or of a template's may keep it."""


def render_template(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    tools: list[Any] | None = None,
    generate: bool = False,
) -> Any:
    """What the tokenizer's chat template makes of messages; called in the main thread.

    generate: with the generation prompt behind them. RendererError when it takes more than
    SECONDS or ROOM_BYTES; else what templates raise, which is anything.
    """
    with _bounds():
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=generate
        )


@contextmanager
def _bounds() -> Iterator[None]:
    handler = signal.signal(signal.SIGALRM, _stop)
    try:
        with limited_memory(ROOM_BYTES):
            try:
                # Again every second: Jinja's optimizer may be amid something that swallows it.
                signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, handler)
    except _Overrun:
        raise _unbounded(f"takes more than {SECONDS:.0f} s") from None
    except MemoryError:
        raise _unbounded(f"takes more than {ROOM_BYTES >> 20} MiB") from None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise _Overrun


def _unbounded(what: str) -> RendererError:
    return RendererError(
        f"the chat template {what} for one conversation",
        wanted="a template that writes the turns one after the other",
        next_step="put the target's own chat template into its folder (is it from its publisher?)",
    )
