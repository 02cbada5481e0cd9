"""What stages take from a host's file: winners of a sweep, or what the playbook wrote there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.host.nccl import FILE as PLAYBOOK_FILE
from pipeline.nccl.cases import USES, Use
from pipeline.nccl.errors import NcclError, NcclFileError
from pipeline.nccl.record import FORMAT, read_record, read_value


def environment_for(
    path: Path | None, use: Use, *, explicit: Mapping[str, str], gpus: int
) -> dict[str, str]:
    """NCCL_* variables of a stage's own processes: the host's, then what settings say.

    path: run.nccl, a file of make tune-nccl, or the playbook's {"extraction": {NAME: value},
    "training": {...}}. explicit wins, name by name, and is all there is without a path, or for a
    stage on fewer than two GPUs. NcclError when the file cannot be read, or a sweep was of another
    number of GPUs or has no winner.
    """
    if path is None or gpus < 2:
        return dict(explicit)
    value = _read(path)
    found = value[use] if _from_playbook(value) else _winner(path, use, gpus=gpus)
    return {**found, **explicit}


def _read(path: Path) -> Any:
    """NcclError that names all three ways out: a stage may meet a host on which nobody did any."""
    try:
        return read_value(path)
    except NcclError as error:
        raise NcclFileError(
            f"run.nccl cannot be read: {error.found}",
            wanted="NCCL's variables of this host, as the playbook or make tune-nccl writes them",
            next_step=f"ansible-playbook site.yml --tags nccl writes {PLAYBOOK_FILE}; or make "
            "tune-nccl OUT=runs/host/nccl.json and SET='run.nccl=runs/host/nccl.json'; or, for "
            "NCCL's own choice, SET='run.nccl=null'",
        ) from error


def _from_playbook(value: Any) -> bool:
    """Whether it is a map of both uses to names and values, and nothing else."""
    return (
        isinstance(value, dict)
        and value.keys() == {*USES}
        and all(isinstance(one, dict) for one in value.values())
        and all(isinstance(item, str) for one in value.values() for item in one.values())
    )


def _winner(path: Path, use: Use, *, gpus: int) -> dict[str, str]:
    record = read_record(path)
    if record["simulated"]:
        raise NcclFileError(
            f"{path} is SIMULATED: measured with gloo on a CPU",
            wanted=f"what make tune-nccl measures on this host's GPUs (format {FORMAT})",
            next_step="make tune-nccl, or set run.nccl to null",
        )
    found = record["uses"][use]
    if len(found["gpus"]) != gpus:
        option = "GPUS" if use == "extraction" else "TRAIN_GPUS"
        raise NcclFileError(
            f"{path}: {use} was measured on {len(found['gpus'])} GPUs, this stage has {gpus}",
            wanted=f"a measurement on {gpus}",
            next_step=f"make tune-nccl {option}=..., or set run.nccl to null",
        )
    if found["environment"] is None:
        raise NcclFileError(
            f"{path}: nothing worked for {use} ({found['why']})",
            wanted="a setting with which NCCL works on this host",
            next_step="make preflight says what to mend; then make tune-nccl",
        )
    return dict(found["environment"])
