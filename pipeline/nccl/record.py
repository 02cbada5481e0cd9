"""The file of a sweep: every row, who won for which use, and on what it was measured.

While a sweep runs, the same content lies beside it as NAME.partial; stages read the whole file.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.host.gpus import GpuFacts
from pipeline.nccl.cases import USES, Case
from pipeline.nccl.errors import NcclFileError
from pipeline.nccl.plan import Grid, Verdict, judge
from pipeline.nccl.rows import Row
from pipeline.slate.errors import SlateError
from pipeline.slate.files import read_json, sha256_json, write_json

FORMAT = 1
ALWAYS = {"NCCL_NVLS_ENABLE": "0"}
"""Of every attempt and every winner: multicast over NVLink is in no host that this is for, and an
attempt killed amid it can leave a switch's GPUs out of service."""


@dataclass
class Record:
    """A sweep's identity, and the rows so far. gpus: of each use, by index in NVML's order.

    nccl: the version that the first attempt reported; None before, and with gloo.
    """

    identity: Mapping[str, Any]
    gpus: Mapping[str, tuple[int, ...]]
    nccl: str | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def simulated(self) -> bool:
        """Whether it was gloo on a CPU that was measured."""
        return bool(self.identity["backend"] != "nccl")

    def verdicts(self, grid: Grid) -> dict[str, Verdict]:
        """The winner of each use, as far as the rows go."""
        return {use: judge(use, self.rows, grid) for use in USES}

    def environments(self, grid: Grid) -> dict[str, dict[str, str] | None]:
        """What the winner of each use sets, all of it; None where nothing worked."""
        return {
            use: None if verdict.environment is None else {**ALWAYS, **verdict.environment}
            for use, verdict in self.verdicts(grid).items()
        }

    def write(self, path: Path, grid: Grid, *, not_run: Sequence[str] = ()) -> None:
        """Writes the file. not_run: names of candidates that time did not suffice for."""
        environments = self.environments(grid)
        uses = {
            use: {
                **asdict(verdict),
                "gpus": list(self.gpus[use]),
                "environment": environments[use],
            }
            for use, verdict in self.verdicts(grid).items()
        }
        write_json(
            path,
            {
                "format": FORMAT,
                "simulated": self.simulated,
                "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "measured_on": {**self.identity, "nccl": self.nccl},
                "always": ALWAYS,
                "uses": uses,
                "rows": [row.to_json() for row in self.rows],
                "not_run": list(not_run),
            },
        )

    def take_over(self, path: Path) -> None:
        """Takes the rows of a file that was begun on the same host with the same versions.

        NcclError when it is of something else.
        """
        value = read_record(path)
        found = dict(value["measured_on"])
        nccl = found.pop("nccl")
        gpus = {use: tuple(one["gpus"]) for use, one in value["uses"].items()}
        differs = sorted(
            key for key in {*found, *self.identity} if found.get(key) != self.identity.get(key)
        )
        differs += ["gpus of the uses"] if gpus != dict(self.gpus) else []
        if differs:
            raise NcclFileError(
                f"{path} was measured with another {', '.join(differs)}",
                wanted="the same host, GPUs, versions and messages",
                next_step="start over: make tune-nccl without RESUME",
            )
        self.nccl = nccl
        self.rows = [Row.from_json(row) for row in value["rows"]]


def read_value(path: Path) -> Any:
    """A file's JSON. NcclError when it cannot be read."""
    try:
        return read_json(path)
    except SlateError as error:
        raise NcclFileError(
            error.found, wanted="a file of make tune-nccl", next_step="make tune-nccl"
        ) from error


def read_record(path: Path) -> dict[str, Any]:
    """A sweep's file. NcclError when it is none, or of another version."""
    value = read_value(path)
    whole = {"format", "simulated", "measured_on", "uses", "rows"}
    if not isinstance(value, dict) or value.get("format") != FORMAT or not whole <= value.keys():
        raise NcclFileError(
            f"{path} is not a file of make tune-nccl of this version",
            wanted=f"format {FORMAT}",
            next_step="make tune-nccl",
        )
    if not (isinstance(value["uses"], dict) and all(_is_use(value["uses"].get(u)) for u in USES)):
        raise NcclFileError(
            f"{path} does not say GPUs and environment of each use",
            wanted=f"a whole file of make tune-nccl, with the uses {', '.join(USES)}",
            next_step="make tune-nccl",
        )
    return dict(value)


def _is_use(value: Any) -> bool:
    """Whether what a file says of one use has the shape that `Record.write` gives it."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("gpus"), list)
        and isinstance(value.get("why"), str)
        and isinstance(found := value.get("environment", ""), dict | None)
        and all(isinstance(one, str) for one in (found or {}).values())
    )


def identify(
    facts: GpuFacts, *, gpus: Sequence[int], backend: str, cases: Sequence[Case]
) -> dict[str, Any]:
    """What rows belong to: host, GPUs, driver, torch, and the messages that were measured."""
    present = {gpu.index: gpu.name for gpu in facts.gpus}
    return {
        "host": socket.gethostname(),
        "backend": backend,
        "gpus": [present[index] for index in gpus] if backend == "nccl" else [],
        "driver": facts.driver if backend == "nccl" else None,
        "torch": metadata.version("torch"),
        "messages": sha256_json([case.to_json() for case in cases])[:16],
    }
