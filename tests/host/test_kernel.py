"""The kernel: how it was started, and that modules can be built for the next one too."""

import pytest
from testinfra.host import Host

from pipeline.host.kernel import KernelFacts, read_kernel
from pipeline.host.lspci import PciFacts
from pipeline.host.reader import Missing
from pipeline.host.wanted import Wanted, WantedKernel
from tests.host.afar import AfarReader
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state


@pytest.fixture
def asked(wanted: Wanted) -> WantedKernel:
    if wanted.kernel is None:
        pytest.skip("kernel: not wanted")
    return wanted.kernel


@pytest.fixture(scope="module")
def kernel(reader: AfarReader) -> KernelFacts:
    return read_kernel(reader)


@pytest.mark.usefixtures("own_kernel")
def test_the_kernel_was_started_with_the_wanted_words(host: Host, asked: WantedKernel) -> None:
    found = host.file("/proc/cmdline").content_string.split()
    last = {word.partition("=")[0]: word for word in found}  # of two values the kernel takes it
    keys = [word.partition("=")[0] for word in asked.command_line]
    if missing := [
        word
        for key, word in zip(keys, asked.command_line, strict=True)
        if word not in found or (keys.count(key) == 1 and last[key] != word)
    ]:
        refuse(
            "HOST-KERNEL-CMDLINE",
            f"/proc/cmdline is without {' '.join(missing)}, or another value follows",
            wanted=" ".join(asked.command_line),
            next_step=by_role("kernel_cmdline") + "; then reboot",
        )


def test_the_next_start_has_the_wanted_words(host: Host, asked: WantedKernel) -> None:
    """GRUB's drop-ins, which a container can have too."""
    text = host.check_output("cat /etc/default/grub /etc/default/grub.d/*.cfg 2>/dev/null; true")
    words = set(text.replace('"', " ").replace("'", " ").split())
    if missing := [word for word in asked.command_line if word not in words]:
        refuse(
            "HOST-KERNEL-CMDLINE",
            f"/etc/default/grub.d is without {' '.join(missing)}",
            wanted=" ".join(asked.command_line),
            next_step=by_role("kernel_cmdline"),
        )


def test_no_port_redirects(asked: WantedKernel, cards: PciFacts) -> None:
    if asked.acs_redirect is None:
        pytest.skip("kernel.acs_redirect: not wanted")
    if cards.denied:
        pytest.skip("ACS registers cannot be read: connect as root, with pciutils on the host")
    if on := [port for port in cards.ports if port.redirect]:
        refuse(
            "HOST-KERNEL-ACS",
            "; ".join(f"{port.address} {' '.join(port.redirect)}" for port in on),
            wanted="cleared on root and switch ports: peer writes are lost with it",
            next_step=by_role("kernel_cmdline") + " (cleanslate-acs.service)",
        )


@pytest.mark.usefixtures("own_kernel")
def test_the_running_kernel_has_headers(asked: WantedKernel, kernel: KernelFacts) -> None:
    if isinstance(kernel.running, Missing):
        pytest.skip(f"the running kernel is not known: {kernel.running.reason}")
    _want_headers(asked, kernel, kernel.running, "it runs")


def test_the_newest_kernel_has_headers(asked: WantedKernel, kernel: KernelFacts) -> None:
    if isinstance(kernel.installed, Missing) or not kernel.installed:
        pytest.skip("no kernel in /boot")
    _want_headers(asked, kernel, kernel.installed[-1], "it boots next")


def _want_headers(asked: WantedKernel, kernel: KernelFacts, release: str, why: str) -> None:
    if not asked.headers:
        pytest.skip("kernel.headers: not wanted")
    if release not in kernel.headers:
        refuse(
            "HOST-KERNEL-HEADERS",
            f"no headers for {release} ({why})",
            wanted=f"linux-headers-{release}: without, it has no driver",
            next_step=by_role("nvidia_driver"),
        )


@pytest.mark.usefixtures("own_kernel", "cards")
def test_dkms_built_the_driver_for_them(wanted: Wanted, kernel: KernelFacts) -> None:
    if wanted.driver is None or not any("dkms" in name for name in wanted.driver.packages):
        pytest.skip("no DKMS package is wanted")
    builds = () if isinstance(kernel.dkms, Missing) else kernel.dkms
    built = {one.kernel for one in builds if "nvidia" in one.module and one.state == "installed"}
    if lacking := [one for one in kernel.to_serve if one not in built]:
        refuse(
            "HOST-KERNEL-DKMS",
            f"no module of DKMS for {', '.join(lacking)}",
            wanted=f"nvidia, installed, for {', '.join(kernel.to_serve)}",
            next_step="dkms autoinstall -k KERNEL; its make.log says why it fails",
        )
