"""Measures the cases of one group with one trainer, in that trainer's interpreter.

Started by `run.py` from the repository root: `python -m benchmarks.train_step.worker`, the request
as JSON on standard input, one JSON line a case on standard output. After a failure it ends: what a
trainer leaves behind then must not touch the next case.
"""

import dataclasses
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import time
from typing import Any, TextIO

import torch
from torch import Tensor

from benchmarks.train_step.cases import Case, make_material

FEWEST_STEPS = 3
"""Steps measured even when the time of a case runs out."""
CEILING_TIMES = 30


def synchronise(device: torch.device) -> None:
    """Waits for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(work: Any, device: torch.device) -> tuple[float, Any]:
    """Seconds until the device has done it, and what it gave."""
    synchronise(device)
    began = time.perf_counter()
    result = work()
    synchronise(device)
    return time.perf_counter() - began, result


def measure(trainer: Any, case: Case, request: dict[str, Any], began: float) -> dict[str, Any]:
    """First step, median step and peak memory of one case."""
    device = torch.device(request["device"])
    trainer.load(case)
    first, loss = timed(trainer.step, device)
    losses = [float(loss)]
    warm = [timed(trainer.step, device)[0] for _ in range(request["warmup"] - 1)]
    left = request["budget"] - (time.perf_counter() - began)
    updates = min(request["updates"], max(FEWEST_STEPS, int(0.9 * left / min(warm, default=first))))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(updates):
        seconds, loss = timed(trainer.step, device)
        times.append(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    if request["profile"]:
        show_kernels(trainer, device)
    losses.append(float(loss))
    seconds = sorted(times)[len(times) // 2]
    return {
        "milliseconds": round(seconds * 1e3, 2),
        "spread": [round(min(times) * 1e3, 2), round(max(times) * 1e3, 2)],
        "updates": updates,
        "tokens_per_second": round(case.tokens / seconds),
        "peak_gib": None if peak is None else round(peak, 2),
        "first_step_seconds": round(first, 1),
        "loss": [round(value, 4) for value in losses],
    }


def show_kernels(trainer: Any, device: torch.device) -> None:
    """Prints where the time of one step goes."""
    with torch.profiler.profile() as profile:
        timed(trainer.step, device)
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=70)
    print(table, file=sys.stderr, flush=True)


def ceiling(device: torch.device) -> float:
    """Floating-point operations a second of the best of several large matrix products."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out: Tensor = left @ right
    best = min(timed(lambda: torch.mm(left, right, out=out), device)[0] for _ in range(8))
    for _ in range(CEILING_TIMES):
        best = min(best, timed(lambda: torch.mm(left, right, out=out), device)[0])
    return float(2 * size**3 / best)


def version_of(distribution: str | None) -> str:
    """Installed version, if the trainer is a distribution of its own."""
    if distribution is None:
        return "this one"
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"


def work(request: dict[str, Any], results: TextIO) -> int:
    """All cases of a request; gives the exit status."""

    def say(**what: Any) -> None:
        print(json.dumps(what), file=results, flush=True)

    device = torch.device(request["device"])
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if request["adapter"] == "ceiling":
        say(flops=ceiling(device), device=name, torch=torch.__version__)
        return 0
    cases = [Case(**fields) for fields in request["cases"]]
    trainer, began = None, time.perf_counter()
    for number, case in enumerate(cases):
        began = time.perf_counter() if number else began
        about: dict[str, Any] = {"case": dataclasses.asdict(case), "torch": torch.__version__}
        try:
            if trainer is None:
                adapter = importlib.import_module(
                    f"benchmarks.train_step.adapters.{request['adapter']}"
                )
                about["note"] = adapter.NOTE
                torch.manual_seed(case.seed)
                trainer = adapter.Trainer(case, make_material(case, device))
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            version = version_of(getattr(adapter, "DISTRIBUTION", request["adapter"]))
            about |= {"version": version, "note": adapter.NOTE}
            say(**about, **measure(trainer, case, request, began))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            say(**about, failure=reason(error), hopeless=trainer is None)
            return 1
    return 0


def main() -> None:
    """Reads the request, keeps standard output for results alone."""
    request = json.load(sys.stdin)
    for place in reversed(request["paths"]):
        sys.path.insert(1, place)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)  # a trainer's own prints go with its errors
        status = work(request, results)
    sys.stderr.flush()
    os._exit(status)  # a compiler's helpers must not hold the process


if __name__ == "__main__":
    main()
