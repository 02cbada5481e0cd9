import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.host.nccl import FILE, difference, read_nccl
from pipeline.host.reader import Missing, Reader

WANTED = {"extraction": {"NCCL_PROTO": "LL"}, "training": {}}


def test_what_the_playbook_wrote_is_read(recorded: Callable[..., Reader]) -> None:
    found = read_nccl(recorded({FILE: json.dumps(WANTED)}))
    assert found == WANTED
    assert difference(WANTED, found) == ""


def test_an_absent_file_is_missing_with_its_path(recorded: Callable[..., Reader]) -> None:
    found = read_nccl(recorded())
    assert isinstance(found, Missing)
    assert difference(WANTED, found) == f"{FILE}: No such file or directory"


@pytest.mark.parametrize("text", ["", "{,}", "[" * 100000])
def test_a_broken_file_is_missing_with_the_reason(
    recorded: Callable[..., Reader], text: str
) -> None:
    found = read_nccl(recorded({FILE: text}))
    assert isinstance(found, Missing)
    assert f"{FILE} is no JSON" in found.reason


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "holds list"),
        ({}, "other values of extraction, training"),
        ({**WANTED, "serving": None}, "other values of serving"),
        ({**WANTED, "training": ["NCCL_PROTO"]}, "other values of training"),
        ({**WANTED, "extraction": {}}, "other values of extraction.NCCL_PROTO"),
        ({**WANTED, "extraction": {"NCCL_PROTO": ""}}, "other values of extraction.NCCL_PROTO"),
        ({**WANTED, "training": {"NCCL_ALGO": None}}, "other values of training.NCCL_ALGO"),
    ],
)
def test_what_differs_is_named(found: Any, said: str) -> None:
    assert difference(WANTED, found) == said
