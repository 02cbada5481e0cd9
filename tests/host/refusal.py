"""How a check of a host says no: code, what was found, what was wanted, what to do."""

from typing import NoReturn

import pytest

NO_GPU = "no NVIDIA GPU on "
NO_KERNEL = "no kernel of its own (a container): "


def refuse(code: str, found: str, *, wanted: str, next_step: str) -> NoReturn:
    """Fails the test with one line; codes are those of pipeline.host.checks."""
    pytest.fail(f"{code}: {found}; wanted {wanted}; next: {next_step}", pytrace=False)


def by_role(role: str) -> str:
    """The next step where a role of the playbook repairs it; in ansible/, with the inventory."""
    return f"ansible-playbook site.yml --tags {role}"
