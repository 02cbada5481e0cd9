"""Rendering many records, in this process or in several, in order and with bounded work in flight.

A tokenizer cannot be sent to another process; a RenderSpec can: each worker loads its own from the
target's folder.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Literal

from pipeline.conversations.errors import ConversationError
from pipeline.conversations.normalise import Skip, normalise
from pipeline.conversations.read import Record, Unreadable
from pipeline.conversations.render import Rendered, Renderer
from pipeline.target.tokenizer import load_tokenizer

_BATCH_RECORDS = 32
_BATCHES_PER_WORKER = 3

Read = Record | Unreadable
Outcome = Rendered | Skip


@dataclass(frozen=True)
class RenderSpec:
    """All that a process needs to make a Renderer: the target's folder and the plain values."""

    folder: Path
    remote_code: bool
    end_of_turn_ids: frozenset[int]
    max_length: int
    too_long: Literal["cut", "skip"]

    def renderer(self) -> Renderer:
        """A new renderer with its own tokenizer. Faults of the target and of the renderer."""
        return Renderer(
            load_tokenizer(self.folder, remote_code=self.remote_code),
            end_of_turn_ids=self.end_of_turn_ids,
            max_length=self.max_length,
            too_long=self.too_long,
        )


def render_records(
    records: Iterable[Read], spec: RenderSpec, *, workers: int
) -> Iterator[tuple[Read, Outcome]]:
    """Every record with its rendering or its Skip, in the records' order, one for one.

    workers: processes; 1 renders in this one. Ahead of the caller at most three batches a worker
    are read. An Unreadable comes out as Skip("unreadable"). Faults of the target and the renderer
    come before the first record; ConversationError if a worker dies.
    """
    renderer = spec.renderer()
    if workers <= 1:
        return ((record, _outcome(record, renderer)) for record in records)
    return _pooled(iter(records), spec, workers=workers)


def _outcome(record: Read, renderer: Renderer) -> Outcome:
    if isinstance(record, Unreadable):
        return Skip("unreadable", record.reason)
    try:
        return renderer.sample(normalise(record.value))
    except Skip as skip:
        # A new one: the caught one would keep every frame of its traceback alive.
        return Skip(skip.reason, skip.detail)


def _pooled(
    records: Iterator[Read], spec: RenderSpec, *, workers: int
) -> Iterator[tuple[Read, Outcome]]:
    # Spawned, not forked: a fork copies the threads' locks of tokenizers and torch, but not the
    # threads that would open them.
    executor = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker
    )
    waiting: deque[tuple[list[Read], Future[list[Outcome]]]] = deque()
    try:
        more = True
        while more or waiting:
            while more and len(waiting) < workers * _BATCHES_PER_WORKER:
                batch = list(islice(records, _BATCH_RECORDS))
                more = bool(batch)
                if batch:
                    waiting.append((batch, executor.submit(_render_batch, batch, spec)))
            if waiting:
                batch, future = waiting.popleft()
                yield from zip(batch, future.result(), strict=True)
    except BrokenProcessPool as error:
        raise ConversationError(
            "a rendering process died, probably for want of memory",
            wanted=f"{workers} processes that live to the end",
            next_step="look into the log and the kernel's messages, or use fewer workers",
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _render_batch(batch: list[Read], spec: RenderSpec) -> list[Outcome]:
    renderer = _own_renderer(spec)
    return [_outcome(record, renderer) for record in batch]


@lru_cache(maxsize=1)
def _own_renderer(spec: RenderSpec) -> Renderer:
    """This worker's renderer, made once: loading a tokenizer takes seconds."""
    return spec.renderer()


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it ends, also by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
