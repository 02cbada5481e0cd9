"""Settings of the kernel: now, and at the next boot."""

import pytest
from testinfra.host import Host

from pipeline.host.wanted import Wanted
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state


def test_a_setting_has_its_value(host: Host, wanted: Wanted, setting: str) -> None:
    file = host.file("/proc/sys/" + setting.replace(".", "/"))
    if not file.exists:
        pytest.skip(f"this kernel has no {setting}")
    value = str((wanted.sysctl or {})[setting])
    if file.content_string.split() != value.split():
        _refuse(f"{setting} is {file.content_string.strip()}", value)


def test_a_setting_has_its_value_after_the_next_boot(
    host: Host, wanted: Wanted, setting: str
) -> None:
    done = host.run("systemd-analyze cat-config sysctl.d")
    if done.rc != 0:
        pytest.skip("no systemd-analyze to read sysctl.d with")
    value = str((wanted.sysctl or {})[setting])
    found = None
    for line in done.stdout.splitlines():
        name, _, text = line.partition("=")
        # A dash: no error where the kernel lacks it. Slashes for dots are allowed.
        if name.strip().removeprefix("-").strip().replace("/", ".") == setting:
            found = text.strip()
    if found is None or found.split() != value.split():
        _refuse(f"sysctl.d has {setting} = {found}", value)


def _refuse(found: str, value: str) -> None:
    refuse("HOST-SYSCTL", found, wanted=value, next_step=by_role("tuning"))
