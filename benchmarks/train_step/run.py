"""One training step of this trainer and of others, on the same tensors, masks and device.

    python -m benchmarks.train_step.run --peers specforge=PYTHON torchspec=FOLDER speculators

Run it from the repository root. A peer is named with the interpreter that has it, or with the
folders (joined by ":") to look for it in, or alone when this interpreter has it. Every trainer runs
in processes of its own, one for a pack length and form; what fails is a line of the table.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from benchmarks.train_step.cases import SHAPES, Case, masks
from benchmarks.train_step.needed import count_rows, multiply_adds
from benchmarks.train_step.table import markdown

ROOT = Path(__file__).parent.parent.parent
FORMS = {
    "ours": ("pack",),
    "specforge": ("batch", "row"),
    "torchspec": ("batch", "row"),
    "speculators": ("pack",),
}
FEWEST_SECONDS = 10.0
"""Time under which no case is begun."""
START_SECONDS = 60.0
"""What a process may take over the budget of its first case, to import and to make tensors."""


@dataclass(frozen=True)
class Place:
    """Where a trainer is: its interpreter, and folders to look for it in."""

    name: str
    python: str = sys.executable
    paths: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Place":
        """From NAME, NAME=PYTHON or NAME=FOLDER[:FOLDER]."""
        name, _, where = text.partition("=")
        if name not in FORMS:
            raise argparse.ArgumentTypeError(f"{name}: no such peer; known: {', '.join(FORMS)}")
        if not where:
            return cls(name)
        if Path(where).is_file():
            return cls(name, python=where)
        return cls(name, paths=tuple(where.split(":")))


def last_line(log: Path) -> str:
    """The last line that a process wrote to its errors."""
    lines = [
        line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line
    ]
    return lines[-1].strip() if lines else "no message"


class Worker:
    """A process that measures one group."""

    def __init__(self, place: Place, request: dict[str, Any], log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [place.python, "-m", "benchmarks.train_step.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        assert self.process.stdin is not None
        # A process that ends at once breaks the pipe; its log says why.
        with contextlib.suppress(BrokenPipeError), self.process.stdin as asked:
            json.dump(request | {"paths": list(place.paths)}, asked)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(line)
        self.lines.put(None)

    def result(self, seconds: float) -> dict[str, Any]:
        """The next line, or why there is none."""
        try:
            line = self.lines.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            return {"failure": f"stopped after {seconds:.0f} s", "ended": True}
        if line is None:
            status = self.process.wait()
            return {"failure": f"exit status {status}: {last_line(self.log)}", "ended": True}
        found: dict[str, Any] = json.loads(line)
        return found | {"ended": "failure" in found}

    def end(self) -> None:
        """Ends the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join()


def measured(
    place: Place, cases: list[Case], options: argparse.Namespace, deadline: float
) -> Iterator[dict[str, Any]]:
    """One result a case of a group; a new process after each failure."""
    log = options.logs / f"{place.name}.log"
    request = {
        "adapter": place.name,
        "device": options.device,
        "warmup": options.warmup,
        "updates": options.updates,
        "budget": options.budget_seconds,
        "profile": options.profile,
    }
    waiting, worker = list(cases), None
    try:
        while waiting:
            left = deadline - time.monotonic()
            if left < FEWEST_SECONDS:
                found: dict[str, Any] = {"failure": "not run: the whole run's time was used up"}
            else:
                allowed = options.budget_seconds
                if worker is None:
                    fields = [dataclasses.asdict(case) for case in waiting]
                    worker = Worker(place, request | {"cases": fields}, log)
                    allowed += START_SECONDS
                found = worker.result(min(allowed, left))
            if found.pop("ended", False) and worker is not None:
                worker.end()
                worker = None
            hopeless = found.pop("hopeless", False)  # it does not get as far as its first batch
            for case in waiting if hopeless else waiting[:1]:
                yield {"trainer": place.name} | found | {"case": dataclasses.asdict(case)}
            waiting = [] if hopeless else waiting[1:]
    finally:
        if worker is not None:
            worker.end()


def measured_ceiling(options: argparse.Namespace) -> dict[str, Any]:
    """The best large matrix product of the device, by this interpreter."""
    request = {"adapter": "ceiling", "device": options.device}
    worker = Worker(Place("ours"), request, options.logs / "ceiling.log")
    found = worker.result(START_SECONDS * 2)
    worker.end()
    if "flops" not in found:
        raise SystemExit(f"the ceiling could not be measured: {found['failure']}")
    return found


def with_share(found: dict[str, Any], ceiling: float) -> dict[str, Any]:
    """A result with the operations its case needs and the share of the ceiling they ran at."""
    case = Case(**found["case"])
    supervised, document = masks(case)
    rows = count_rows(supervised, document, steps=case.steps)
    operations = 2 * sum(multiply_adds(rows, case.sizes).values())
    found |= {"needed_tflop": round(operations / 1e12, 3), "ceiling_tflops": round(ceiling / 1e12)}
    if "milliseconds" in found:
        found["share_of_ceiling"] = round(operations / (found["milliseconds"] / 1e3) / ceiling, 4)
    return found


def cases_of(options: argparse.Namespace, form: str) -> Iterator[list[Case]]:
    """Groups of cases of one form."""
    every = [
        Case(shape, tokens, share, steps, form, options.document, options.seed)
        for shape, tokens, steps, share in product(
            options.shape, options.tokens, options.steps, options.supervised
        )
    ]
    for _, group in groupby(every, key=lambda case: case.group):
        yield list(group)


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Place.parse, nargs="*", default=[])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["kimi"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--supervised", type=float, nargs="+", default=[0.3, 0.6, 1.0])
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 7], help="TTT depths")
    parser.add_argument("--forms", nargs="+", default=["pack", "batch", "row"])
    parser.add_argument("--document", type=int, default=1024, help="tokens a document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--updates", type=int, default=10, help="measured steps")
    parser.add_argument("--budget-seconds", type=float, default=180.0, help="of one case")
    parser.add_argument("--total-seconds", type=float, default=7200.0, help="of the whole run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--without-ours", action="store_true")
    parser.add_argument("--profile", action="store_true", help="kernels of a step, in the logs")
    parser.add_argument("--logs", type=Path, default=None, help="folder for what trainers print")
    parser.add_argument("--out", type=Path, default=None, help="file for the JSON lines")
    options = parser.parse_args()
    if options.logs is None:
        options.logs = Path(tempfile.mkdtemp(prefix="train_step-"))
    options.logs.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    """Measures, a JSON line each, and ends with the table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that workers are ended
    options = arguments()
    deadline = time.monotonic() + options.total_seconds
    ceiling = measured_ceiling(options)
    places = options.peers if options.without_ours else [Place("ours"), *options.peers]
    results: list[dict[str, Any]] = []
    for place in places:
        for form in FORMS[place.name]:
            for group in cases_of(options, form) if form in options.forms else ():
                for found in measured(place, group, options, deadline):
                    results.append(with_share(found, ceiling["flops"]))
                    line = json.dumps(results[-1] | {"device": ceiling["device"]})
                    print(line, flush=True)
                    if options.out is not None:
                        with options.out.open("a", encoding="utf-8") as out:
                            out.write(line + "\n")
    print(f"\n{ceiling['device']}, torch {ceiling['torch']}, {ceiling['flops'] / 1e12:.0f} TFLOP/s")
    print(f"logs of the trainers: {options.logs}\n")
    print(markdown(results), flush=True)


if __name__ == "__main__":
    main()
