"""What the trainer's data path delivers, against raw reads of the same files.

    python benchmarks/loader/measure.py --tokens 60000 --width 7168 --folder DIR [--device cuda]

Writes a dataset of random states into DIR (kept, and used again when it fits), then prints one
JSON line a measurement:
raw: the same files, front to back, in reads of 4 MiB by several threads; past the page cache and
through it. loader: every pack once, the consumer does nothing. staged (CPU only): the same, but
rows stay in the buffers, since a CPU takes longer to widen them than to read them. paced: a
consumer that works as a
trainer of --rate tokens/s would (on a GPU by matrix products, else by sleeping).
"Cold" drops the files from the page cache first (they are synced, so the kernel can).
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.store.layout import row_bytes, state_fields
from pipeline.store.reader import DatasetFacts, StateDataset
from pipeline.store.writer import PlannedSample, ShardBuilder
from pipeline.training import staging, stream
from pipeline.training.batches import PackOrder, PackReader, packs_ahead
from pipeline.training.staging import Buffer

DOCUMENT = 1024
SHARD_BYTES = 1 << 30
RAW_PIECE = 4 << 20
VOCABULARY = 1000
HOW = (  # name, past the page cache, dropped from it first
    ("direct", True, True),
    ("buffered cold", False, True),
    ("buffered warm", False, False),
)


def write_dataset(folder: Path, *, tokens: int, width: int, supervised: float) -> None:
    """Documents of 1024 tokens, the last share of each supervised; shards of about 1 GiB."""
    fields = state_fields(width, taps=3)
    documents = max(1, tokens // DOCUMENT)
    a_shard = max(1, SHARD_BYTES // (DOCUMENT * row_bytes(fields)))
    draw = torch.Generator().manual_seed(0)
    # One block serves all: what is measured does not depend on the values.
    states = torch.randn(DOCUMENT, width, generator=draw).bfloat16()
    mask = torch.arange(DOCUMENT) >= round(DOCUMENT * (1 - supervised))
    ids = torch.arange(DOCUMENT, dtype=torch.int32) % VOCABULARY
    starts = range(0, documents, a_shard)
    for shard, first in enumerate(starts):
        names = [f"s-{n}" for n in range(first, min(first + a_shard, documents))]
        plan = [PlannedSample(name, DOCUMENT, "train") for name in names]
        builder = ShardBuilder(folder, f"states-{shard:05d}", fields=fields, plan=plan)
        for name in names:
            rows = {field.name: states for field in fields if field.width}
            builder.place(name, {**rows, "input_ids": ids, "supervised": mask})
        builder.finish()
    DatasetFacts(width, (1, 2, 3), "f" * 64, len(starts)).write(folder)


def open_dataset(arguments: argparse.Namespace) -> StateDataset:
    """The dataset of the arguments, written when the folder holds none."""
    name = f"states-{arguments.width}-{arguments.tokens}-{arguments.supervised}"
    folder = arguments.folder / name
    if not (folder / "dataset.json").exists():
        folder.mkdir(parents=True)
        write_dataset(
            folder,
            tokens=arguments.tokens,
            width=arguments.width,
            supervised=arguments.supervised,
        )
    arguments.files = sorted(folder.glob("*.safetensors"))
    return StateDataset.open(folder)


def drop(files: list[Path]) -> None:
    """Drops files from the page cache, as far as the kernel does so."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def timed(work: Callable[[], int]) -> dict[str, Any]:
    """MB/s and processor seconds a GB of work that gives the bytes it moved."""
    began, processor = time.perf_counter(), time.process_time()
    size = work()
    seconds = time.perf_counter() - began
    return {
        "mb_per_second": round(size / 1e6 / seconds),
        "processor_seconds_per_gb": round((time.process_time() - processor) / size * 1e9, 3),
        "seconds": round(seconds, 3),
    }


def read_raw(files: list[Path], *, direct: bool, threads: int) -> int:
    """Reads whole files, each thread its own piece after piece. Gives the bytes read."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    handles = [os.open(path, flags) for path in files]
    jobs = [(file, at) for file in handles for at in range(0, os.fstat(file).st_size, RAW_PIECE)]
    buffers = [Buffer(room=RAW_PIECE, pinned=False) for _ in range(threads)]

    def work(number: int) -> int:
        return sum(
            os.preadv(file, [buffers[number].memory], at) for file, at in jobs[number::threads]
        )

    try:
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(work, range(threads)))
    finally:
        for file in handles:
            os.close(file)


def orders(dataset: StateDataset, *, tokens: int) -> list[PackOrder]:
    """Every sample once, in an order drawn anew, in packs of about `tokens`."""
    order = np.random.Generator(np.random.PCG64(1)).permutation(len(dataset.entries))
    size = max(1, tokens // DOCUMENT)
    return [PackOrder(order[at : at + size]) for at in range(0, len(order), size)]


class Work:
    """A consumer's work for a number of seconds: matrix products on a GPU, else sleep."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
            self._out = torch.empty_like(self._matrix)
            self._products(30)
            torch.cuda.synchronize()
            began = time.perf_counter()
            self._products(100)
            torch.cuda.synchronize()
            self._each = (time.perf_counter() - began) / 100

    def _products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix, out=self._out)

    def do(self, seconds: float) -> float:
        """Works; gives the seconds that it took."""
        began = time.perf_counter()
        if self._device.type == "cuda":
            self._products(max(1, round(seconds / self._each)))
            torch.cuda.current_stream().synchronize()
        else:
            time.sleep(seconds)
        return time.perf_counter() - began


def load(
    reader: PackReader, packs: list[PackOrder], *, work: Work | None, tokens: int, rate: float
) -> tuple[int, dict[str, Any]]:
    """Takes every pack once. Gives the bytes read, and for a working consumer the flow."""
    size, worked = 0, 0.0
    with packs_ahead(reader, packs) as ahead:
        for ready in ahead:
            size += ready.size
            if work is not None:
                worked += work.do(tokens / rate)
        if reader.mark() is not None:
            torch.cuda.synchronize()
        flow = ahead.flow()
    if work is None:
        return size, {}
    wanted = size / 1e6 / (tokens / rate * len(packs))
    return size, {
        "waiting": round(flow.waiting, 4),
        "wanted_mb_per_second": round(flow.wanted),
        "got_mb_per_second": round(flow.got),
        "rate_wants_mb_per_second": round(wanted),
        "readers_busy": round(flow.reading, 3),
        "work_slowed_by": round(worked / (tokens / rate * len(packs)) - 1, 4),
        "line": flow.line(),
    }


def measure(arguments: argparse.Namespace) -> None:
    """All measurements, one line each."""
    dataset = open_dataset(arguments)
    files, device = arguments.files, torch.device(arguments.device)
    total = sum(path.stat().st_size for path in files)
    packs = orders(dataset, tokens=arguments.pack)
    say("dataset", gb=round(total / 1e9, 2), files=len(files), packs=len(packs))
    raw: dict[str, int] = {}
    for kind, direct, cold in HOW:
        if cold:
            drop(files)
        try:
            found = timed(lambda d=direct: read_raw(files, direct=d, threads=arguments.threads))
        except OSError as error:
            say("raw", how=kind, error=str(error))
            continue
        raw[kind] = found["mb_per_second"]
        say("raw", how=kind, threads=arguments.threads, **found)

    staging.CHUNK_BYTES = (arguments.chunk_mib << 20) - staging.DIRECT_ALIGNMENT
    work, lay_out = Work(device), stream.lay_out
    modes = ["loader", "paced"] if device.type == "cuda" else ["staged", "loader", "paced"]
    for (kind, direct, cold), mode in itertools.product(HOW, modes):
        if cold:
            drop(files)
        stream.lay_out = nothing if mode == "staged" else lay_out
        reader = PackReader(
            dataset,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            vocabulary_size=VOCABULARY,
            steps=5,
            decay=0.8,
            device=device,
            threads=arguments.threads,
            direct=direct,
        )
        more: dict[str, Any] = {}

        def once(reader: PackReader = reader, mode: str = mode, more: dict[str, Any] = more) -> int:
            size, flow = load(
                reader,
                packs,
                work=work if mode == "paced" else None,
                tokens=arguments.pack,
                rate=arguments.rate,
            )
            more.update(flow)
            return size

        found = timed(once)
        if mode != "paced" and kind in raw:
            more["share_of_raw"] = round(found["mb_per_second"] / raw[kind], 3)
        say(mode, how=kind, **found, **more)


def nothing(*_: Any, **__: Any) -> None:
    """In place of laying rows out."""


def say(what: str, **values: Any) -> None:
    """One line of results."""
    print(json.dumps({"what": what, **values}), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--supervised", type=float, default=1.0)
    parser.add_argument("--pack", type=int, default=4096, help="tokens")
    parser.add_argument("--rate", type=float, default=60000, help="tokens/s of the paced consumer")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--chunk-mib", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    say(
        "machine",
        cores=os.cpu_count(),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
    )
    measure(arguments)


if __name__ == "__main__":
    main()
