"""Several processes that train one drafter: who they are, what they add up, how they stop together.

torchrun starts one process a rank and says who it is in RANK, LOCAL_RANK, WORLD_SIZE and MASTER_*.
Small facts always travel over gloo on the CPU, so that ranks can agree to stop while their devices
are busy; what travels between devices is in `exchange`.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.faults import Fault, described
from pipeline.slate.files import disk_fault
from pipeline.training.errors import LostPeers, RankError, RequestError, TrainingError

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=30)  # a rank may wait while rank 0 writes and digests a checkpoint
_MESSAGE_BYTES = 8192


@dataclass(frozen=True)
class Ranks:
    """This process among all. rank 0..world-1; device: where this rank computes."""

    rank: int
    world: int
    device: torch.device
    _control: Any = field(default=None, repr=False)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks of a small float64 CPU tensor; every rank gets the same."""
        if self.world == 1:
            return values
        total = values.clone()
        with lost_peers(self):
            dist.all_reduce(total, group=self._control)
        return total

    def same(self, value: int) -> bool:
        """Whether every rank holds this value."""
        if self.world == 1:
            return True
        ends = torch.tensor([value, -value])
        with lost_peers(self):
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._control)
        return bool(ends[0] == -ends[1])

    def agree(self, problem: Fault | None) -> None:
        """Goes on only if no rank has a problem.

        A rank with one raises it. The others raise RankError with the words of the first that has.
        """
        if self.world == 1:
            if problem is not None:
                raise problem
            return
        failed = torch.zeros(self.world, dtype=torch.int64)
        failed[self.rank] = problem is not None
        with lost_peers(self):
            dist.all_reduce(failed, group=self._control)
            if not failed.any():
                return
            first = int(failed.nonzero()[0, 0])
            message = _encode(problem) if self.rank == first else torch.zeros_like(_encode(None))
            dist.broadcast(message, first, group=self._control)
        if problem is not None:
            raise problem
        found, wanted, next_step, code = _decode(message)
        raise RankError(f"rank {first}: {found}", wanted=wanted, next_step=next_step, code=code)

    def together(self, work: Callable[[], T], *, doing: str) -> T:
        """Runs this rank's part of something; all ranks go on from it, or none does.

        Within work, all ranks may agree that none has failed so far; otherwise it must not wait for
        others. An error that is no Fault becomes a TrainingError saying what was being done.
        """
        problem: Fault | None = None
        result: list[T] = []
        try:
            result.append(work())
        except RankError:
            raise  # of another rank: who has it said so, and waits for nobody
        except Fault as error:
            problem = error
        except Exception as error:
            again = "make train RESUME=1"
            disk = isinstance(error, OSError) and disk_fault(error, place=Path(), next_step=again)
            problem = disk or TrainingError(
                f"{doing}: {described(error)}",
                wanted="work without an error",
                next_step="read the traceback in the log (out of memory? lower tokens_per_pack)",
            )
            problem.__cause__ = error
        self.agree(problem)
        return result[0]


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Joins the processes that torchrun started; alone when it started none.

    device "cpu" uses gloo, "cuda" gives each local rank its own GPU and uses nccl. RequestError
    when that GPU does not exist.
    """
    place = _environment()
    local, world, rank = place["LOCAL_RANK"], place["WORLD_SIZE"], place["RANK"]
    if device == "cuda":
        count = torch.cuda.device_count()
        if local >= count:
            raise RequestError(
                f"train: rank {rank} needs GPU {local}, {count} visible",
                wanted="one GPU a rank",
                next_step="start fewer ranks, or set train.device to cpu",
            )
        torch.cuda.set_device(local)
    chosen = torch.device(device, local) if device == "cuda" else torch.device(device)
    if world == 1:
        yield Ranks(0, 1, chosen)
        return
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    ranks = Ranks(rank, world, chosen, control)
    with lost_peers(ranks):
        # Connects the devices now: later, a rank that fails meanwhile would leave the others here.
        dist.all_reduce(torch.zeros(1, device=chosen))
    yield ranks
    # Not reached on an error: tearing down while a peer is gone may hang; the process ends anyway.
    dist.destroy_process_group()


def own_rank() -> int:
    """This process's rank, known before it joins the others; 0 when alone."""
    return _environment()["RANK"]


def _environment() -> dict[str, int]:
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    # torchrun's contract is these variables; there is no other way to learn them.
    return {name: int(os.environ.get(name, value)) for name, value in alone.items()}  # noqa: TID251


@contextmanager
def lost_peers(ranks: Ranks) -> Iterator[None]:
    """Turns a broken connection into a fault that says which rank noticed."""
    try:
        yield
    except RuntimeError as error:
        raise LostPeers(
            f"rank {ranks.rank} lost its peers: {str(error).splitlines()[0]}",
            wanted=f"{ranks.world} ranks alive",
            next_step="look for the rank that ended first in this log (out of memory? see dmesg)",
        ) from error


def _encode(problem: Fault | None) -> Tensor:
    parts: list[str] = []
    if problem is not None:
        parts = [problem.found, problem.wanted, problem.next_step, problem.code]
    text = json.dumps([part[:2000] for part in parts]).encode()[:_MESSAGE_BYTES]
    return torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8).clone()


def _decode(message: Tensor) -> list[str]:
    text = bytes(message.tolist()).decode()
    try:
        parts: list[str] = json.loads(text)
    except ValueError:  # cut: escapes made it longer than the buffer
        return [text.strip(), "no error", "read this rank's log", ""]
    return parts
