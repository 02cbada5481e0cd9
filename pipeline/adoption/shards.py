"""Adopted requests into shards of states: each byte read once, each shard whole or invisible."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from torch import Tensor

from pipeline.adoption.dump import Request
from pipeline.adoption.judge import Verdict, take
from pipeline.adoption.survey import pool_of
from pipeline.adoption.torch_file import Unfit
from pipeline.slate.files import write_json
from pipeline.store.index import Entry
from pipeline.store.layout import state_fields
from pipeline.store.reader import PreparedSamples
from pipeline.store.writer import PlannedSample, ShardBuilder

NO_DUMP = "no_dump"
"""Why a sample is left out that no request fits."""


@dataclass(frozen=True)
class Source:
    """Where the rows come from. claims: by sample id, the requests that fit it, best first."""

    root: Path
    claims: Mapping[str, Sequence[Request]]
    verdicts: Mapping[str, Verdict]
    norm: Tensor


def sources_name(number: int) -> str:
    """Name of the file that says which request each sample of a shard came from."""
    return f"sources-{number:05d}.json"


def write_shards(
    source: Source,
    samples: PreparedSamples,
    shards: Sequence[tuple[int, Sequence[Entry], str]],
    *,
    folder: Path,
    threads: int,
    advance: Callable[[int], None],
) -> None:
    """Writes shards of (number, samples, name), `threads` of them at a time.

    Beside each, before it counts as whole: {"adopted": {sample: request}, "failed": {request:
    [reason, detail]}}. advance: called with bytes of the dump that were read.
    """
    fields = state_fields(len(source.norm), taps=3)
    counting = Lock()

    def count(size: int) -> None:
        with counting:
            advance(size)

    def write(number: int, members: Sequence[Entry], name: str) -> None:
        plan = [PlannedSample(entry.id, entry.length, entry.split) for entry in members]
        builder = ShardBuilder(folder, name, fields=fields, plan=plan)
        adopted: dict[str, str] = {}
        failed: dict[str, list[str]] = {}
        try:
            for entry in members:
                reason = NO_DUMP
                for request in source.claims.get(entry.id, ()):
                    pieces = source.verdicts[request.name].pieces
                    try:
                        *taps, final = take(source.root, request, pieces, source.norm)
                    except Unfit as unfit:
                        reason = unfit.reason
                        failed[request.name] = [unfit.reason, unfit.detail]
                        continue
                    finally:
                        count(request.bytes)
                    sample = samples.read(entry)
                    rows = {f"tap_{i}": tap for i, tap in enumerate(taps)}
                    rows |= {"final": final, "input_ids": sample.input_ids}
                    builder.place(entry.id, {**rows, "supervised": sample.supervised})
                    adopted[entry.id] = request.name
                    break
                else:
                    builder.skip(entry.id, reason)
            write_json(folder / sources_name(number), {"adopted": adopted, "failed": failed})
            builder.finish()
        finally:
            builder.abandon()

    with pool_of(threads) as pool:
        for done in [pool.submit(write, *shard) for shard in shards]:
            done.result()
