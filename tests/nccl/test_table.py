"""What a sweep says beside its rows: its heading, and what to put into ready_host."""

import pytest
import yaml

from pipeline.nccl.record import Record
from pipeline.nccl.table import for_ready_host, heading

ON = {"host": "gpu01", "backend": "nccl", "gpus": ["G", "G"], "driver": "580", "torch": "2.11"}
GPUS = {"extraction": (0, 1), "training": (0, 1)}
WINNERS = {
    "extraction": {"NCCL_ALGO": "allreduce:Ring", "NCCL_BUFFSIZE": "1048576"},
    "training": {"NCCL_NVLS_ENABLE": "0"},
}


@pytest.mark.parametrize(("version", "first"), [(None, "NCCL on "), ("2.28.9", "NCCL 2.28.9 on ")])
def test_the_heading_has_the_version_as_soon_as_it_is_known(
    version: str | None, first: str
) -> None:
    assert heading(Record(ON, GPUS, version)) == f"{first}gpu01: 2 x G, driver 580, torch 2.11"


def test_winners_are_yaml_that_fits_into_ready_host() -> None:
    lines = for_ready_host(WINNERS)
    assert lines == [
        "for ready_host in ansible/group_vars/gpu_hosts.yml, or of this host:",
        "  nccl:",
        "    extraction:",
        "      NCCL_ALGO: allreduce:Ring",
        "      NCCL_BUFFSIZE: '1048576'",
        "    training:",
        "      NCCL_NVLS_ENABLE: '0'",
    ]
    text = "\n".join(["ready_host:", *lines[1:]])
    assert yaml.safe_load(text) == {"ready_host": {"nccl": WINNERS}}


def test_without_a_winner_of_every_use_there_is_nothing_to_put_in() -> None:
    assert for_ready_host({**WINNERS, "training": None}) == []
