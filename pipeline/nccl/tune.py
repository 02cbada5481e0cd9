"""The sweep: attempts one after another until every use has its winner, or time is over."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.host.gpus import GpuFacts, read_gpus
from pipeline.nccl.attempt import Launch, attempt
from pipeline.nccl.cases import CASES, SIMULATED_CASES, USES, Case, Use
from pipeline.nccl.errors import HINTS, NcclError
from pipeline.nccl.plan import Grid, Planned, confirmation, pending
from pipeline.nccl.record import ALWAYS, Record, identify
from pipeline.nccl.rows import name_of, rows_of
from pipeline.nccl.table import for_ready_host, heading, row_line, table
from pipeline.settings.environment import child_environment, stage_environment
from pipeline.slate.lock import lock
from pipeline.slate.stage import gpu_problems

_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_RESERVED = 3  # attempts kept for the winners' second launches


@dataclass(frozen=True)
class Options:
    """What a sweep is asked for.

    gpus: of extraction; empty: all that are there. train_gpus: of training; empty: the same.
    ranks: processes of gloo. budget_seconds: after it no attempt starts; 0: 70 s a GPU, 150 s at
    least. inject: name of a candidate -> what its last rank does wrong, for tests.
    """

    out: Path
    gpus: tuple[int, ...] = ()
    train_gpus: tuple[int, ...] = ()
    backend: Literal["nccl", "gloo"] = "nccl"
    ranks: int = 2
    resume: bool = False
    budget_seconds: float = 0.0
    silence_seconds: float = 15.0
    grid: Grid = field(default_factory=Grid)
    cases: tuple[Case, ...] = ()
    inject: Mapping[str, str] = field(default_factory=dict)


def tune(options: Options, say: Callable[[str], None]) -> Record:
    """Runs what is not there yet, says every result, writes `out`, and gives what it holds.

    NcclError when GPUs are missing or held, or when nothing works for a use; the file is written in
    the second case too.
    """
    sweep = _Sweep(options, say)
    with lock(options.out.absolute().parent, purpose="tune-nccl"):
        sweep.run()
    return sweep.record


def gpu_indexes(text: str) -> tuple[int, ...]:
    """`0,1,2` as indexes; empty: none. NcclError for anything else."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isascii() and part.isdecimal() and len(part) < 4 for part in parts):
        raise NcclError(
            f"GPUs are {text!r}",
            wanted="indexes with commas between, as nvidia-smi counts them",
            next_step="make tune-nccl GPUS=0,1",
        )
    return tuple(map(int, parts))


class _Sweep:
    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        simulated = options.backend == "gloo"
        self._cases = options.cases or (SIMULATED_CASES if simulated else CASES)
        facts = GpuFacts((), None, None) if simulated else read_gpus()
        gpus = _choose(options, facts)
        every = sorted({index for chosen in gpus.values() for index in chosen})
        identity = identify(facts, gpus=every, backend=options.backend, cases=self._cases)
        self.record = Record(identity, gpus)
        self._partial = options.out.with_name(f"{options.out.name}.partial")
        self._budget = options.budget_seconds or max(150.0, 70.0 * len(every))
        self._longest = 0.0  # of an attempt so far, seconds

    def run(self) -> None:
        record, grid = self.record, self._options.grid
        if self._options.resume:
            self._take_over()
        self._say(heading(record))
        self._try_all()
        not_run = [
            f"{use}: {name_of(one.environment)}" for use in USES for one in self._pending(use)
        ]
        record.write(self._options.out, grid, not_run=not_run)
        self._partial.unlink(missing_ok=True)
        for line in table(record, self._cases, record.verdicts(grid)):
            self._say(line)
        if not_run:
            self._say(
                f"not run, for the {self._budget:.0f} s were over: {', '.join(not_run)} "
                "(make tune-nccl RESUME=1 goes on)"
            )
        self._say(f"written: {self._options.out} (run.nccl takes it)")
        if not record.simulated:
            for line in for_ready_host(record.environments(grid)):
                self._say(line)
        self._refuse_nothing()

    def _try_all(self) -> None:
        began = time.monotonic()
        closing = False
        while True:
            left = self._budget - (time.monotonic() - began)
            # The last attempts are kept for the second launches, without which nothing can win.
            closing = closing or left < (1 + _RESERVED) * self._longest
            chosen = self._choose_next(closing=closing)
            if chosen is None or left < self._longest:
                return
            self._attempt(*chosen)
            self.record.write(self._partial, self._options.grid)

    def _pending(self, use: Use, *, closing: bool = False) -> list[Planned]:
        following = confirmation if closing else pending
        return following(use, self.record.rows, self._options.grid)

    def _choose_next(self, *, closing: bool) -> tuple[Planned, list[Use]] | None:
        """The first thing that a use lacks, and all uses on the same GPUs that lack it too."""
        lacking = {use: self._pending(use, closing=closing) for use in USES}
        for use, planned in lacking.items():
            if planned:
                gpus = self.record.gpus
                same = [o for o in USES if planned[0] in lacking[o] and gpus[o] == gpus[use]]
                return planned[0], same
        return None

    def _attempt(self, planned: Planned, uses: list[Use]) -> None:
        options, record = self._options, self.record
        cases = tuple(case for use in uses for case in self._cases if case.use == use)
        gpus = record.gpus[uses[0]]
        world = len(gpus) or options.ranks
        result = attempt(
            Launch(
                backend=options.backend,
                world=world,
                cases=cases,
                environment=_environment(planned.environment, gpus=gpus),
                log=options.out.with_name(f"{options.out.name}.log"),
                silence_seconds=options.silence_seconds,
                inject=options.inject.get(name_of(planned.environment)),
            )
        )
        self._longest = max(self._longest, result.wall_seconds)
        self._same_version(result.nccl)
        rows = rows_of(
            result,
            cases,
            uses=uses,
            environment=planned.environment,
            launch=planned.launch,
            world=world,
        )
        record.rows += rows
        for row in rows:
            self._say(row_line(row))

    def _same_version(self, nccl: str | None) -> None:
        record = self.record
        if nccl is not None and record.nccl not in (nccl, None):
            raise NcclError(
                f"NCCL is {nccl}, the rows so far are of {record.nccl}",
                wanted="one version in one sweep",
                next_step="start over: make tune-nccl without RESUME",
            )
        record.nccl = nccl or record.nccl

    def _take_over(self) -> None:
        found = [path for path in (self._partial, self._options.out) if path.is_file()]
        if not found:
            raise NcclError(
                f"there is neither {self._partial} nor {self._options.out}",
                wanted="a sweep that was begun",
                next_step="make tune-nccl without RESUME",
            )
        self.record.take_over(found[0])
        self._say(f"going on with {len(self.record.rows)} rows of {found[0]}")

    def _refuse_nothing(self) -> None:
        without = [
            f"{use}: {verdict.why}"
            for use, verdict in self.record.verdicts(self._options.grid).items()
            if verdict.environment is None
        ]
        if without:
            codes = dict.fromkeys(row.code for row in self.record.rows if row.code)
            raise NcclError(
                f"{', '.join(codes)}: {'; '.join(without)}",
                wanted="a setting with which NCCL gives every sum right, in time",
                next_step="; ".join(HINTS[code] for code in codes) or "make tune-nccl RESUME=1",
            )


def _choose(options: Options, facts: GpuFacts) -> dict[str, tuple[int, ...]]:
    """GPUs of each use; none with gloo. NcclError when they are missing, held or too few."""
    if options.backend == "gloo":
        return dict.fromkeys(USES, ())
    if facts.problem:
        raise NcclError(
            facts.problem,
            wanted="NVIDIA GPUs whose driver answers",
            next_step="make preflight says what is missing; make tune-nccl is for hosts with GPUs",
        )
    extraction = options.gpus or tuple(gpu.index for gpu in facts.gpus)
    training = options.train_gpus or extraction
    every = tuple(dict.fromkeys((*extraction, *training)))
    if problems := gpu_problems(facts, every):
        raise NcclError(
            "; ".join(problems),
            wanted="every GPU of the sweep there, at 0 MiB with no process",
            next_step="stop what holds them, or name others: make tune-nccl GPUS=0,1",
        )
    for use, gpus in (("extraction", extraction), ("training", training)):
        if len(gpus) < 2 or len(set(gpus)) != len(gpus):
            raise NcclError(
                f"{use} on GPUs {list(gpus)}",
                wanted="two or more, each once: one sends nothing to itself",
                next_step="make tune-nccl GPUS=0,1",
            )
    return {"extraction": extraction, "training": training}


def _environment(own: Mapping[str, str], *, gpus: Sequence[int]) -> dict[str, str]:
    """The whole environment of an attempt: what a stage's processes get, and the candidate's."""
    extra = {**_NO_MULTICAST, **ALWAYS, "NCCL_DEBUG": "WARN", **own}
    return child_environment(stage_environment(threads=1, gpus=gpus, extra=extra))
