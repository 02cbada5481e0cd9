"""One rank's part in measuring a case: fill, start together, time, compare every number."""

import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.nccl.cases import Case
from pipeline.nccl.patterns import Pattern, first_wrong

_SLEEP_CYCLES = 4_000_000  # about 2 ms: the device waits until the host has queued a whole batch

# torch 2.13 renamed both and warns of the old names, which are all that 2.11 has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def join(request: dict[str, object], device: torch.device) -> None:
    """Joins the ranks of the request and sends one number around, which connects them."""
    dist.init_process_group(
        str(request["backend"]),
        init_method=f"file://{request['rendezvous']}",
        rank=int(str(request["rank"])),
        world_size=int(str(request["world"])),
    )
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def device_of(backend: str, rank: int) -> torch.device:
    """This rank's device. RuntimeError when nccl is asked for and not there."""
    if backend != "nccl":
        return torch.device("cpu")
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise RuntimeError(f"torch {torch.__version__} has no NCCL, or sees no GPU")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def about(device: torch.device) -> dict[str, str | None]:
    """Version of NCCL, and the device's name."""
    if device.type != "cuda":
        return {"nccl": None, "device": "cpu"}
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {"nccl": ".".join(map(str, version)), "device": torch.cuda.get_device_name(device)}


def measure(
    case: Case, *, rank: int, world: int, device: torch.device, injected: str | None = None
) -> tuple[list[float], str | None]:
    """Seconds of one message in each timed batch, and where a number was wrong, if one was.

    Every round sends other numbers, so that what an earlier round left behind is no right answer.
    """
    pattern = Pattern(case, rank=rank, world=world, device=device)
    together = torch.zeros(1, device=device)
    seconds: list[float] = []
    for round_ in range(case.warmups + case.samples):
        sent = pattern.sent(round_)
        if injected is not None:
            _go_wrong(injected, sent)
        found = _room(case, sent, world=world)
        if device.type == "cuda":
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        dist.all_reduce(together)  # the ranks start together
        lap = _start_clock(device)
        for into, share in zip(found, sent, strict=True):
            _send(case, into, share)
        took = lap() / case.batch
        if round_ >= case.warmups:
            seconds.append(took)
        wrong = first_wrong(found, pattern.wanted(round_))
        if wrong is not None:
            return seconds, f"round {round_}, {wrong}"
    return seconds, None


def _send(case: Case, into: Tensor, share: Tensor) -> None:
    if case.operation == "all_reduce":
        dist.all_reduce(into)  # in place: into is share
    elif case.operation == "reduce_scatter":
        _reduce_scatter(into, share)
    elif case.operation == "all_gather":
        _all_gather(into, share)
    else:
        dist.all_to_all_single(into, share)


def _room(case: Case, sent: Tensor, *, world: int) -> Tensor:
    """Where results go, [batch, n of a result]: no value in it that could be a right one."""
    if case.operation == "all_reduce":
        return sent
    n = case.elements(world)
    size = n // world if case.operation == "reduce_scatter" else n
    return sent.new_full((case.batch, size), -1)


def _start_clock(device: torch.device) -> Callable[[], float]:
    """Starts now; what it gives stops it, waits, and says the seconds.

    On a GPU both ends are marks in its own queue: what the host does meanwhile is not measured.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        return lambda: time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()

    def stop() -> float:
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    return stop


def _go_wrong(injected: str, sent: Tensor) -> None:
    """What tests ask for: a rank that sleeps, adds one to its share, raises, or is killed."""
    if injected == "hang":
        time.sleep(3600)
    elif injected == "wrong":
        sent[-1, -1] += 1
    elif injected == "crash":
        raise RuntimeError("something broke\nLast error:\ninjected by a test")
    elif injected == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
