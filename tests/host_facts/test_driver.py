from collections.abc import Callable

import pytest

from pipeline.host.driver import Module, parse_module, read_module
from pipeline.host.reader import Missing, Reader

pytestmark = pytest.mark.usefixtures("simulated")

OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@x)
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)
"""
PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.247.01  Tue Apr  8 10:11:16 UTC 2025
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)
"""


@pytest.mark.parametrize(
    ("text", "module", "branch"),
    [
        (OPEN, Module("580.95.05", open=True), 580),
        (PROPRIETARY, Module("535.247.01", open=False), 535),
        ("NVRM version: NVIDIA UNIX Open Kernel Module  570.86.15", Module("570.86.15", True), 570),
    ],
)
def test_version_and_flavour_are_the_loaded_modules(
    recorded: Callable[..., Reader], text: str, module: Module, branch: int
) -> None:
    found = read_module(recorded({"/proc/driver/nvidia/version": text}))
    assert found == module
    assert module.branch == branch


def test_without_a_module_it_is_missing(recorded: Callable[..., Reader]) -> None:
    assert isinstance(read_module(recorded()), Missing)


def test_a_text_without_a_version_is_missing() -> None:
    assert isinstance(parse_module("GCC version: 12\n"), Missing)
