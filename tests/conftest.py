"""Options of tests that want GPUs, and of those that look at a host; how examples are drawn."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long one example takes says how busy the machine is, not that the product is wrong.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

_READY_HOST = Path(__file__).parents[1] / "ansible" / "group_vars" / "gpu_hosts.yml"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tests that want GPUs")
    group.addoption("--sglang-python", help="interpreter that has SGLang and this package")
    group.addoption("--sglang-flags", default="", help="arguments of the server, split at blanks")
    group = parser.getgroup("tests/host: is a host ready (with --hosts)")
    group.addoption("--host-wanted", type=Path, default=_READY_HOST, help="file with ready_host")
    group.addoption(
        "--host-gpus",
        choices=["if-there", "required"],
        default="if-there",
        help="a host without NVIDIA GPUs: hardware checks are skipped, or fail",
    )
