"""What `make adopt` delivers, beside `cat` and `cp` of the same bytes.

Makes a dump of made-up states that pass every test (final states that point at their next token,
aux states that resemble them), adopts it cold, and prints one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from pipeline.adoption.dump import FILES
from pipeline.adoption.norm import read_norm
from pipeline.settings.load import load_settings
from pipeline.stages.plan import run_stage
from pipeline.stages.run import Run
from pipeline.target.tensors import read_head


def make(root: Path, *, mib: int, rows: int, target: Path) -> int:
    """Writes dump and samples of about `mib` MiB, `rows` rows a request; gives the bytes."""
    head = read_head(target).float()
    width = head.shape[1]
    norm = read_norm(target, hidden_size=width)
    generator = torch.Generator().manual_seed(1)
    count, total = max(2, (mib << 20) // (rows * width * 2 * 4)), 0
    with (root / "samples.jsonl").open("w") as file:
        for number in range(count):
            ids = torch.randint(6, len(head), (rows,), generator=generator)
            near = [head[ids.roll(-1)] / head[ids].norm(dim=1).mean()]
            for _ in range(3):
                near.append(near[-1] + torch.randn(rows, width, generator=generator) / width**0.5)
            final = near[0] / near[0].square().mean(1, keepdim=True).sqrt() * norm
            folder = root / "dump" / f"req_{number}"
            folder.mkdir(parents=True)
            for name, states in zip(FILES, (near[3], near[2], near[1], final), strict=True):
                torch.save(states.bfloat16(), folder / name)  # noqa: TID251  the old format
                total += (folder / name).stat().st_size
            line = {"input_ids": ids.tolist(), "loss_mask": [0] * 8 + [1] * (rows - 8)}
            file.write(json.dumps(line) + "\n")
    return total


def cold(root: Path) -> None:
    """Drops a folder's files from the page cache."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def timed(command: list[str]) -> float:
    """Seconds of a shell command and of the writing that it left behind."""
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    os.sync()
    return time.monotonic() - start


def main() -> None:
    """Measures once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    root: Path = options.folder
    overrides = [
        f"run.root={root / 'runs'}",
        f"run.threads={options.threads}",
        f"target.source.hidden_size={options.width}",
        "target.source.layers=5",
        f"prepare.max_length={options.rows}",
        "prepare.input=null",
        "prepare.answers=file",
        f"prepare.tokens={root / 'samples.jsonl'}",
        f"adopt.dump={root / 'dump'}",
        "extract.shard_bytes=268435456",
    ]
    run = Run(load_settings("tiny", overrides=overrides).settings)
    run_stage("target", run, resume=False)
    if not (root / "dump").exists():
        make(root, mib=options.mib, rows=options.rows, target=run.target_folder)
    size = sum(path.stat().st_size for path in (root / "dump").rglob("*") if path.is_file())
    run_stage("prepare", run, resume=False)
    cold(root / "dump")
    cat = timed(["bash", "-c", f"cat {root}/dump/*/*.pt > /dev/null"])
    cold(root / "dump")
    copy = timed(["cp", "-r", str(root / "dump"), str(root / "copy")])
    subprocess.run(["rm", "-r", "--", str(root / "copy")], check=True)
    cold(root / "dump")
    start, before = time.monotonic(), os.times()
    run_stage("adopt", run, resume=False)
    os.sync()
    adopt, after = time.monotonic() - start, os.times()
    line = {
        "mib": size >> 20,
        "threads": run.threads,
        "cat_mb_s": round(size / cat / 1e6),
        "cp_mb_s": round(size / copy / 1e6),
        "adopt_mb_s": round(size / adopt / 1e6),
        "adopt_cpu_seconds_a_gb": round((after.user + after.system - before.user - before.system)
                                        / size * 1e9, 2),
    }  # fmt: skip
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
