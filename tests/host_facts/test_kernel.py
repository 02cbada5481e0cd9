from collections.abc import Callable

import pytest

from pipeline.host.kernel import Build, installed_kernels, parse_dkms, read_kernel
from pipeline.host.reader import Missing, Reader

pytestmark = pytest.mark.usefixtures("simulated")


def test_forty_is_newer_than_nine_and_leftovers_are_no_kernels() -> None:
    boot = ("vmlinuz-6.1.0-40-amd64", "vmlinuz-6.1.0-9-amd64", "vmlinuz-6.1.0-9-amd64.old",
            "initrd.img-6.12.0-1-amd64", "grub")  # fmt: skip
    assert installed_kernels(boot) == ("6.1.0-9-amd64", "6.1.0-40-amd64")


@pytest.mark.parametrize(
    ("line", "build"),
    [
        ("nvidia/580.95.05, 6.1.0-40-amd64, x86_64: installed",
         Build("nvidia", "580.95.05", "6.1.0-40-amd64", "installed")),
        ("nvidia, 580.95.05, 6.1.0-40-amd64, x86_64: built",
         Build("nvidia", "580.95.05", "6.1.0-40-amd64", "built")),
        ("nvidia-current-open/580.95.05, 6.1.0-9-amd64, x86_64: installed (original_module exists)",
         Build("nvidia-current-open", "580.95.05", "6.1.0-9-amd64", "installed")),
    ],
)  # fmt: skip
def test_dkms_tells_each_build(line: str, build: Build) -> None:
    assert parse_dkms(f"Deprecated feature: x\n{line}\n") == (build,)


def test_a_module_that_was_only_added_is_built_for_no_kernel() -> None:
    assert parse_dkms("nvidia/580.95.05: added\n") == ()


def test_running_and_newest_kernel_and_their_headers(recorded: Callable[..., Reader]) -> None:
    reader = recorded(
        {
            "/proc/cmdline": "BOOT_IMAGE=/vmlinuz iommu=pt quiet\n",
            "/proc/sys/kernel/osrelease": "6.1.0-9-amd64\n",
            "/boot/vmlinuz-6.1.0-9-amd64": "",
            "/boot/vmlinuz-6.1.0-30-amd64": "",
            "/boot/vmlinuz-6.1.0-40-amd64": "",
            "/lib/modules/6.1.0-9-amd64/build/Makefile": "",
            "/lib/modules/6.1.0-40-amd64/modules.dep": "",
        }
    )
    kernel = read_kernel(reader)
    assert kernel.command_line == ("BOOT_IMAGE=/vmlinuz", "iommu=pt", "quiet")
    assert kernel.to_serve == ("6.1.0-9-amd64", "6.1.0-40-amd64")
    assert kernel.headers == ("6.1.0-9-amd64",)
    assert isinstance(kernel.dkms, Missing)


def test_the_newest_kernel_that_runs_counts_once(recorded: Callable[..., Reader]) -> None:
    files = {"/proc/sys/kernel/osrelease": "6.1.0-9\n", "/boot/vmlinuz-6.1.0-9": ""}
    assert read_kernel(recorded(files)).to_serve == ("6.1.0-9",)
