"""What one rank does in tests of several, under torchrun or alone.

python -m tests.training.rank_cases CASE,... FOLDER DEVICE: leaves files in FOLDER.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from pipeline.draft.ttt import Frozen, Pack
from pipeline.draft.weights import BUCKETS
from pipeline.faults import Fault
from pipeline.training.batches import ReadyPack
from pipeline.training.errors import TrainingError
from pipeline.training.exchange import own_part, start_sum
from pipeline.training.optimizer import MasterAdamW
from pipeline.training.ranks import Ranks, join_ranks
from pipeline.training.step import Computation, run_step
from tests.draft.make import make_config, make_drafter, make_rows

ROOT = Path(__file__).parents[2]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = {
    "plain": ("float32", "float32"),
    "rounded": ("float32", "bfloat16"),
    "half": ("bfloat16", "float32"),
}
"""Compute dtype and reduce dtype by name."""
STEPS, HALF = 6, 3


def make(ranks: Ranks, kind: str) -> MasterAdamW:
    compute, reduce = (DTYPES[name] for name in KINDS[kind])
    return MasterAdamW(
        make_drafter(make_config(), seed=3).float(),
        dtype=compute,
        ranks=ranks,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        reduce_dtype=reduce,
    )


def draw(*key: int, size: tuple[int, ...]) -> torch.Tensor:
    seed = sum(part * 1009**at for at, part in enumerate(key))
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def add_gradients(optimizer: MasterAdamW, ranks: Ranks, *, step: int) -> None:
    """Adds this rank's parts of step's gradient, of 1, 2 or 3 parts: a rank may have none."""
    optimizer.gradients.zero_()
    for part in range(ranks.rank, 1 + step % 3, ranks.world):
        for number, bucket in enumerate(BUCKETS):
            gradient = getattr(optimizer.gradients, bucket)
            gradient += draw(step, part, number, size=gradient.shape).to(gradient.device)


def update(optimizer: MasterAdamW, ranks: Ranks, *, step: int, loss: float = 1.0) -> list[float]:
    order = BUCKETS if ranks.rank else BUCKETS[::-1]  # the order of these calls is no rank's own
    early = 3 + step % 4
    for bucket in order[:early]:
        optimizer.reduce(bucket)
    for bucket in order[early:] if ranks.rank == 0 else ():
        getattr(optimizer.gradients, bucket)[:] += 1.0  # not final yet, so no sum has begun
    sums = torch.tensor([loss, ranks.rank], dtype=torch.float64, device=ranks.device)
    report = optimizer.step(1e-2, clip_norm=20.0, sums=sums).wait().tolist()
    optimizer.settle(updated=all(map(math.isfinite, report)))
    return report


def keep(optimizer: MasterAdamW, ranks: Ranks, path: Path) -> None:
    model, state = optimizer.gather()
    if ranks.rank == 0:
        save_file({**{f"model.{n}": t for n, t in model.items()}, **state}, path)
    else:
        assert (model, state) == ({}, {})


def bring(optimizer: MasterAdamW, path: Path) -> None:
    tensors = load_file(path)
    model = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    optimizer.restore(model, state={n: t for n, t in tensors.items() if f"{n}."[:6] != "model."})


def train(ranks: Ranks, folder: Path) -> None:
    """Whole runs, and second halves of the runs whose first half lies in `folder`."""
    for kind in KINDS:
        optimizer = make(ranks, kind)
        reports = []
        for step in range(1, STEPS + 1):
            add_gradients(optimizer, ranks, step=step)
            reports.append(update(optimizer, ranks, step=step))
            assert ranks.same(optimizer.mark())
            if step == HALF:
                keep(optimizer, ranks, folder / f"{kind}-half-of-{ranks.world}.safetensors")
        keep(optimizer, ranks, folder / f"{kind}-of-{ranks.world}.safetensors")
        if ranks.rank == 0:
            (folder / f"{kind}-of-{ranks.world}.json").write_text(json.dumps(reports))
    for world in (1, 2):
        start = folder / f"plain-half-of-{world}.safetensors"
        if start.exists():
            optimizer = make(ranks, "plain")
            bring(optimizer, start)
            keep(optimizer, ranks, folder / f"again-{world}-on-{ranks.world}.safetensors")
            for step in range(HALF + 1, STEPS + 1):
                add_gradients(optimizer, ranks, step=step)
                update(optimizer, ranks, step=step)
            keep(optimizer, ranks, folder / f"plain-{world}-on-{ranks.world}.safetensors")


def refuse(ranks: Ranks, folder: Path) -> None:
    """Steps of which the last rank has a number that is not finite."""
    optimizer = make(ranks, "plain")
    add_gradients(optimizer, ranks, step=2)
    update(optimizer, ranks, step=2)
    keep(optimizer, ranks, folder / "before.safetensors")
    last = ranks.rank == ranks.world - 1
    for name, value, loss in (("gradient", float("inf"), 1.0), ("loss", 0.0, float("nan"))):
        add_gradients(optimizer, ranks, step=2)
        optimizer.gradients.fc[0, 0] += value if last else 0.0
        update(optimizer, ranks, step=2, loss=loss if last else 1.0)
        keep(optimizer, ranks, folder / f"after-{name}.safetensors")


def sums(ranks: Ranks, folder: Path) -> None:
    assert ranks.same(2**62 + 1)
    assert not ranks.same(2**62 + ranks.rank)
    for name, dtype in DTYPES.items():
        buffer = draw(7, ranks.rank, size=(8 * ranks.world,)).to(ranks.device)
        start_sum(buffer, ranks=ranks, dtype=dtype).wait()
        mine = own_part(buffer, ranks).cpu()
        save_file({"own": mine}, folder / f"sum-{name}-{ranks.rank}.safetensors")


SMALL = make_config(
    hidden_size=64, target_hidden_size=64, intermediate_size=96, head_dim=16,
    draft_vocabulary_size=32, target_vocabulary_size=64, max_position_embeddings=4096,
)  # fmt: skip
PACKS = ([30, 41], [90], [17, 5, 20], [64], [33])
"""Lengths of the samples of each pack; steps take three packs, one, and one."""


def packs(ranks: Ranks, folder: Path) -> None:
    """Optimizer steps over real packs, dealt to ranks as the loop does; the second rank has none
    in most steps.
    """
    all_packs = []
    for number, lengths in enumerate(PACKS):
        supervised = [at % 7 > 3 and number != 4 for n in lengths for at in range(n)]
        rows, embedding, head, vocabulary = make_rows(SMALL, lengths, supervised, seed=number)
        rows = Pack.of(
            ids=rows.ids.to(ranks.device),
            taps=rows.taps.float().to(ranks.device),
            final=rows.final.float().to(ranks.device),
            supervised=rows.supervised,
            document=rows.document,
            steps=4,
            decay=0.8,
        )
        all_packs.append(rows)
    model = make_drafter(SMALL, seed=3).float()
    optimizer = MasterAdamW(
        model, dtype=torch.float32, ranks=ranks, betas=(0.9, 0.95), weight_decay=0.1
    )
    frozen = Frozen.of(
        embedding.float().to(ranks.device), head.float().to(ranks.device), vocabulary
    )
    computation = Computation(model, optimizer.weights, frozen, vocabulary, 4, "kl")
    reader = SimpleNamespace(names=lambda samples, most: str(samples))
    results = []
    for step, chosen in enumerate(([0, 1, 2], [3], [4], [1], [2, 3]), 1):
        weight = sum(all_packs[number].plan.weight for number in chosen)
        mine = chosen[ranks.rank :: ranks.world]
        ready = (ReadyPack(all_packs[n], np.array([n]), weight, 0) for n in mine)
        result = run_step(
            computation,
            optimizer,
            step=step,
            mine=[np.array([number]) for number in mine],
            packs=ready,
            reader=reader,
            ranks=ranks,
            learning_rate=1e-2,
            clip_norm=0.5,
        )
        numbers = [result.loss, result.weight, result.tokens, result.gradient_norm, result.updated]
        results.append(numbers + result.metrics.count.tolist() + result.metrics.loss.tolist())
    keep(optimizer, ranks, folder / f"packs-of-{ranks.world}.safetensors")
    if ranks.rank == 0:
        (folder / f"packs-of-{ranks.world}.json").write_text(json.dumps(results))


def fail(ranks: Ranks, folder: Path) -> None:
    """Rank 1 fails when the others have sums under way that can never end."""
    optimizer = make(ranks, "plain")

    def work() -> None:
        ranks.agree(None)
        if ranks.rank == 1:
            raise TrainingError("no more", wanted="more", next_step="wait")
        for bucket in BUCKETS:
            optimizer.reduce(bucket)

    ranks.together(work, doing="work")


def said(path: Path) -> str:
    """What a rank wrote of its error, without where it was raised: lines move."""
    return re.sub(r" \(rank_cases\.py line \d+\)$", "", path.read_text())


def fail_early(ranks: Ranks, folder: Path) -> None:
    """Rank 1 fails before the others have started anything."""

    def work() -> None:
        if ranks.rank == 1:
            raise ValueError("seven")
        ranks.agree(None)

    ranks.together(work, doing="work")


CASES = {case.__name__: case for case in (train, refuse, sums, packs, fail, fail_early)}


def start(names: str, folder: Path, *, ranks: int, device: str = "cpu") -> int:
    """Runs cases on several ranks; gives the exit status."""
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", "-m", "tests.training.rank_cases"]
    command += [names, str(folder), device]
    done = subprocess.run(command, stdout=2, cwd=ROOT, timeout=120, check=False)
    return done.returncode


def load(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path.with_suffix(".safetensors"))


def equal(left: Path, right: Path) -> bool:
    one, other = load(left), load(right)
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def distance(left: Path, right: Path) -> float:
    """Largest relative distance of two tensors of the same name."""
    one, other = load(left), load(right)
    assert one.keys() == other.keys()
    return max(float((t - other[n]).norm() / t.norm()) for n, t in one.items() if t.ndim)


def main() -> None:
    names, folder, device = sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    with join_ranks(device) as ranks:
        for name in names:
            try:
                CASES[name](ranks, folder)
            except Fault as error:
                said = folder / f"{name}-{ranks.rank}.txt"
                said.write_text(f"{type(error).__name__}: {error.found}")
                os._exit(1)  # as the worker does


if __name__ == "__main__":
    main()
