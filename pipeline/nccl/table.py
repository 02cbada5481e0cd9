"""The table of a sweep, in Markdown, so that it can be kept beside a benchmark."""

from collections.abc import Iterator, Mapping, Sequence

import yaml

from pipeline.nccl.cases import USES, Case
from pipeline.nccl.plan import Verdict
from pipeline.nccl.record import Record
from pipeline.nccl.rows import DEFAULT, Measured, Row, name_of


def table(record: Record, cases: Sequence[Case], verdicts: dict[str, Verdict]) -> Iterator[str]:
    """Lines: on what, then each use's rows: median (p95), bus bandwidth; at last its winner."""
    yield heading(record)
    for use in USES:
        names = [case.name for case in cases if case.use == use]
        rows = [row for row in record.rows if row.use == use]
        gpus = ", ".join(map(str, record.gpus[use]))
        yield ""
        yield f"{use}, GPUs {gpus}: median (p95), GB/s of bus" if gpus else f"{use}: SIMULATED"
        yield ""
        yield f"| candidate | launch | result | score | {' | '.join(names)} |"
        yield "|" + "---|" * (4 + len(names))
        for row in rows:
            yield _line(row, names)
        for row in rows:
            if row.status != "ok":
                yield f"{row.name}: {row.code}: {row.detail}"
        yield f"{use}: {sentence(verdicts[use])}"


def heading(record: Record) -> str:
    """Host, GPUs and versions, as far as known, in one line; SIMULATED where it is no NCCL."""
    on = record.identity
    if record.simulated:
        return f"SIMULATED: gloo on the CPU of {on['host']}, torch {on['torch']}; no NCCL, no GPU"
    names = sorted(set(on["gpus"]))
    nccl = f"NCCL {record.nccl}" if record.nccl else "NCCL"  # known after the first attempt
    return (
        f"{nccl} on {on['host']}: {len(on['gpus'])} x {', '.join(names)}, driver "
        f"{on['driver']}, torch {on['torch']}"
    )


def for_ready_host(environments: Mapping[str, Mapping[str, str] | None]) -> list[str]:
    """What `ready_host` of this host is to have, as YAML; nothing unless every use has a winner.

    environments: use -> what its winner sets.
    """
    if None in environments.values():
        return []
    text = yaml.safe_dump({"nccl": dict(environments)}, width=200)
    return [
        "for ready_host in ansible/group_vars/gpu_hosts.yml, or of this host:",
        *(f"  {line}" for line in text.splitlines()),
    ]


def row_line(row: Row) -> str:
    """One row while the sweep runs."""
    what = f"{row.use}: {row.name}" + (", again" if row.launch else "")
    if row.status == "ok":
        return f"{what}: {time_text(row.score)} ({row.wall_seconds:.0f} s)"
    return f"{what}: {row.status.upper()}, {row.code}: {row.detail}"


def sentence(verdict: Verdict) -> str:
    """Who won and why."""
    if verdict.environment is None:
        return f"no winner: {verdict.why}"
    numbers = ""
    if verdict.gain is not None and verdict.spread is not None:
        numbers = f" (gain {100 * verdict.gain:.1f} %, spread {100 * verdict.spread:.1f} %)"
    return f"{name_of(verdict.environment) or DEFAULT} wins: {verdict.why}{numbers}"


def time_text(seconds: float) -> str:
    """`12.3 us`, `4.56 ms`."""
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _line(row: Row, names: Sequence[str]) -> str:
    found = {case.case: case for case in row.cases}
    cells = [_cell(found.get(name)) for name in names]
    result = "ok" if row.status == "ok" else row.status.upper()
    score = time_text(row.score) if row.status == "ok" else ""
    return f"| {row.name} | {row.launch + 1} | {result} | {score} | {' | '.join(cells)} |"


def _cell(case: Measured | None) -> str:
    if case is None:
        return ""
    bandwidth = f"{case.bus_bytes_per_second / 1e9:.3g}"
    return f"{time_text(case.median_seconds)} ({time_text(case.p95_seconds)}), {bandwidth}"
