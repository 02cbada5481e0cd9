"""The gradient of one optimizer step over the same samples, in several layouts of packs and ranks.

python -m tests.field_reports.loss_layouts FOLDER: under torchrun, or alone; leaves files in FOLDER.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.slate.files import read_json
from pipeline.training.batches import PackOrder, packs_ahead
from pipeline.training.ranks import Ranks, join_ranks
from pipeline.training.request import TrainRequest
from pipeline.training.start import start_run
from pipeline.training.step import run_step

# Packs of one step. Sample 5 is the padding: 50 rows of which none is supervised.
LAYOUTS = {
    "at once": [[0, 1, 2, 3, 4]],
    "at once, padded": [[0, 1, 2, 3, 4, 5]],
    "four and one": [[0, 1, 2, 3], [4]],
    "four and one, padded": [[0, 1, 5, 2, 3], [4]],
    "one and four": [[4], [3, 2, 1, 0]],
    "one by one": [[0], [1], [2], [3], [4]],
    "padding apart": [[5], [4, 0], [1, 2, 3]],
}
FIRST_BETA = 0.9


def gradients(ranks: Ranks, folder: Path) -> None:
    """Writes each layout's gradient by parameter name: the first moment over 1 - beta."""
    request = TrainRequest.from_json(read_json(folder / "request.json"))
    for name, packs in LAYOUTS.items():
        run = start_run(request, ranks)[0]
        every = tuple(np.array(pack) for pack in packs)
        mine = list(every[ranks.rank :: ranks.world])
        orders = [PackOrder(pack, weigh=every if n == 0 else ()) for n, pack in enumerate(mine)]
        with packs_ahead(run.reader, orders) as ready:
            result = run_step(
                run.computation,
                run.optimizer,
                step=1,
                mine=mine,
                packs=ready,
                reader=run.reader,
                ranks=ranks,
                learning_rate=1e-3,
                clip_norm=0.0,
            )
        moments = run.optimizer.gather()[1]  # by all ranks; only rank 0 gets something
        if ranks.rank == 0:
            found = {
                key.removesuffix(".exp_avg"): moment / (1 - FIRST_BETA)
                for key, moment in moments.items()
                if key.endswith(".exp_avg")
            }
            found["loss"] = torch.tensor(result.loss)
            save_file(found, folder / f"{name} on {ranks.world}.safetensors")


def start(folder: Path, *, ranks: int) -> None:
    """Runs this file on several ranks, which meet over gloo."""
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", "-m", __name__, str(folder)]
    subprocess.run(command, stdout=2, cwd=Path(__file__).parents[2], timeout=300, check=True)


def load(folder: Path, name: str, *, ranks: int) -> dict[str, Tensor]:
    return load_file(folder / f"{name} on {ranks}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_ranks("cpu") as all_ranks:
        gradients(all_ranks, Path(sys.argv[1]))
