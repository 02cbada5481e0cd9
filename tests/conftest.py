"""What a host's own SGLang needs to be started with; for the tests that want GPUs."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tests that want GPUs")
    group.addoption("--sglang-python", help="interpreter that has SGLang and this package")
    group.addoption("--sglang-flags", default="", help="arguments of the server, split at blanks")
