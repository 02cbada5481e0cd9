"""How fast a sealed dataset is looked at, beside cat and sha256sum of the same files.

    python benchmarks/verify/measure.py --folder DIR [--shards 4] [--shard-mib 512] [--repeat 2]

Makes an output of `extract` in DIR once (random states of width 7168, one large file and small ones
beside it) and prints one JSON line a measurement: MB/s, processor seconds a GB, how much of a file
that others use stayed in the page cache. Every reading starts cold.
"""

import argparse
import json
import os
import resource
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.slate.manifest import Manifest, changed_files, seal_files
from pipeline.slate.wipe import MARKER, claim
from pipeline.stages.verify import look
from pipeline.store.check import check_states
from pipeline.store.layout import state_fields
from pipeline.store.reader import DatasetFacts
from pipeline.store.writer import PlannedSample, ShardBuilder

WIDTH, LENGTH = 7168, 1024


def make(folder: Path, shards: int, shard_mib: int) -> None:
    """A sealed output of random states; kept for the next time."""
    output = folder / "extract"
    if (output / "manifest.json").exists():
        return
    claim(output, stage="extract", intent={"settings": {}, "inputs": {}})
    fields = state_fields(WIDTH, taps=3)
    samples = max(1, (shard_mib << 20) // (LENGTH * 4 * 2 * WIDTH))
    known, kept = {}, 0
    for number in range(shards):
        # The first is four times as large as the others.
        count = samples * 4 if number == 0 else samples
        plan = [PlannedSample(f"s-{number}-{n}", LENGTH, "train") for n in range(count)]
        builder = ShardBuilder(output, f"states-{number:05d}", fields=fields, plan=plan)
        for sample in plan:
            rows = {
                field.name: torch.randn(LENGTH, WIDTH).to(torch.bfloat16)
                for field in fields
                if field.width
            }
            rows["input_ids"] = torch.arange(LENGTH, dtype=torch.int32)
            rows["supervised"] = torch.ones(LENGTH, dtype=torch.bool)
            builder.place(sample.id, rows)
        index = builder.finish()
        known[index.shard] = index.sha256
        kept += count
    DatasetFacts(WIDTH, (3, 31, 59), "f", shards).write(output)
    files = seal_files(output, known=known, volatile=lambda _name: False, threads=2)
    rows = kept * LENGTH
    counts = {"read": kept, "kept": kept, "rows": rows, "skipped": {},
              "rows_per_split": {"train": rows, "held_out": 0}}  # fmt: skip
    facts = {"hidden_size": WIDTH, "taps": [3, 31, 59], "target_fingerprint": "f"}
    Manifest("extract", {}, {}, counts, facts, files, {"measured": {}}).write(output)


def forget(paths: list[Path]) -> None:
    """Takes files out of the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(path: Path) -> int | None:
    """Bytes of a file in the page cache, by fincore; None where that is not installed."""
    try:
        done = subprocess.run(
            ["fincore", "-bnro", "RES", path], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(done.stdout)


def processor() -> float:
    """Seconds of processor, ours and those of children."""
    own, theirs = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime


def main() -> None:
    """All ways, `--repeat` times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--shard-mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=2)
    given = parser.parse_args()
    folder = given.folder.absolute()
    make(folder, given.shards, given.shard_mib)
    output, cores = folder / "extract", len(os.sched_getaffinity(0))
    manifest = Manifest.read(output)
    files = sorted(path for path in output.iterdir() if path.name != MARKER)
    names = " ".join(f"'{path}'" for path in files)
    total = sum(path.stat().st_size for path in files)

    def shell(command: str) -> Callable[[], object]:
        return lambda: subprocess.run(
            ["bash", "-c", command], check=True, stdout=subprocess.DEVNULL
        )

    def changed(threads: int, direct: bool) -> Callable[[], object]:
        return lambda: changed_files(
            output, manifest, threads=threads, advance=lambda _count: None, direct=direct
        )

    ways = {
        "cat": shell(f"cat {names}"),
        "dd, past the cache": shell(
            f"for f in {names}; do dd if=$f of=/dev/null bs=8M iflag=direct status=none; done"
        ),
        "sha256sum": shell(f"sha256sum {names}"),
        f"sha256sum, {cores} at once": shell(
            f"printf '%s\\n' {names} | xargs -P {cores} -n 1 sha256sum"
        ),
        f"digests, through the cache, {cores} threads": changed(cores, False),
        f"digests, past the cache, {cores} threads": changed(cores, True),
        "digests, past the cache, 4 threads": changed(4, True),
        "make verify: digests and every row": lambda: look(
            folder, stages=["extract"], threads=cores
        ),
        "at the end of extract: digests, each sample's too": lambda: deque(
            check_states(output, threads=cores), maxlen=0
        ),
    }
    other = folder / "of-others"
    if not other.exists():
        other.write_bytes(os.urandom(256 << 20))
    for name, work in ways.items():
        for _ in range(given.repeat):
            forget([*files, other])
            other.read_bytes()
            used, started = processor(), time.perf_counter()
            work()
            seconds, used = time.perf_counter() - started, processor() - used
            left = resident(other)
            line = {
                "way": name,
                "MB/s": round(total / seconds / 1e6),
                "processor_s_per_GB": round(used / total * 1e9, 2),
                "cached_of_it_MB": round(sum(resident(path) or 0 for path in files) / 1e6),
                "cached_of_others_MB": None if left is None else round(left / 1e6),
                "load": round(os.getloadavg()[0], 1),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
