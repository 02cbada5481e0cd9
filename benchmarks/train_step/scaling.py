"""What several devices give over one: this trainer's step, a pack of its own on each rank.

    python -m benchmarks.train_step.scaling --ranks 1 2 --tokens 4096 16384

from the repository root. Every number of ranks runs under torchrun; each prints a JSON line.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.train_step.adapters.ours import Trainer
from benchmarks.train_step.cases import SHAPES, Case, make_material
from pipeline.training.ranks import join_ranks, own_rank

ROOT = Path(__file__).parent.parent.parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WARM_STEPS = 4


def measure(arguments: argparse.Namespace) -> None:
    """On every rank: steps back to back, as the loop runs them; rank 0 prints."""
    with join_ranks(arguments.device) as ranks:
        for tokens in arguments.tokens:
            case = Case(
                arguments.shape, tokens, arguments.supervised, arguments.steps, "pack",
                document=arguments.document, seed=own_rank(),
            )  # fmt: skip
            material = make_material(case, ranks.device)
            trainer = Trainer(
                case, material, ranks=ranks, reduce_dtype=DTYPES[arguments.reduce_dtype]
            )
            trainer.load(case)
            del material
            for _ in range(WARM_STEPS):
                trainer.step()
            finish(ranks.device)
            ranks.agree(None)
            began = time.perf_counter()
            for _ in range(arguments.updates):
                loss = trainer.step()
            finish(ranks.device)
            ranks.agree(None)
            seconds = (time.perf_counter() - began) / arguments.updates
            peak = torch.cuda.max_memory_allocated() / 2**30 if ranks.device.type == "cuda" else 0
            if ranks.rank == 0:
                line = {
                    **vars(arguments), "tokens": tokens, "world": ranks.world,
                    "milliseconds": round(seconds * 1e3, 2), "loss": round(float(loss), 4),
                    "tokens_per_second": round(ranks.world * tokens / seconds),
                    "peak_gib": round(peak, 2),
                }  # fmt: skip
                print(json.dumps(line), flush=True)
            del trainer


def finish(device: torch.device) -> None:
    """Waits for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Command line; starts itself again under torchrun for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", choices=SHAPES, default="kimi")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--supervised", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--document", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--reduce-dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank-of-many", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of_many:
        del arguments.ranks, arguments.rank_of_many
        measure(arguments)
        return
    for ranks in arguments.ranks:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(f"--nproc-per-node={ranks}", "-m", "benchmarks.train_step.scaling"),
                *sys.argv[1:],
                "--rank-of-many",
            ],
            cwd=ROOT,
            check=True,
        )


if __name__ == "__main__":
    main()
