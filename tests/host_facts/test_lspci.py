from collections.abc import Callable

import pytest

from pipeline.host.lspci import PciGpu, parse_lspci, read_pci
from pipeline.host.reader import Missing, Output, Reader

pytestmark = pytest.mark.usefixtures("simulated")

PORT = """\
0000:40:01.1 PCI bridge [0604]: Advanced Micro Devices, Inc. [AMD] Root Port [1022:14a5] (rev 01)
	Bus: primary=40, secondary=41, subordinate=41, sec-latency=0
	Capabilities: [58] Express (v2) Root Port (Slot+), MSI 00
		LnkCap:	Port #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <64us
		LnkSta:	Speed 2.5GT/s (downgraded), Width x16
	Capabilities: [2a0 v1] Access Control Services
		ACSCap:	SrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
		ACSCtl:	SrcValid{a} TransBlk- ReqRedir{b} CmpltRedir{c} UpstreamFwd{a} EgressCtrl-
	Kernel driver in use: pcieport
"""
GPU = """\
0000:41:00.0 3D controller [0302]: NVIDIA Corporation GB202GL [RTX PRO 6000] [10de:2bb5] (rev a1)
	Region 0: Memory at e0000000 (64-bit, prefetchable) [size=64M]
	Region 1: Memory at 20000000000 (64-bit, prefetchable) [size=128G]
	Capabilities: [60] Express (v2) Endpoint, MSI 00
		LnkCap:	Port #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 unlimited
		LnkSta:	Speed 2.5GT/s (downgraded), Width x{width}
	Kernel driver in use: {driver}
	Kernel modules: nvidiafb, nouveau, nvidia_drm, nvidia
"""
OTHERS = """\
0000:41:00.1 Audio device [0403]: NVIDIA Corporation GB202 High Definition Audio [10de:22e8]
	Kernel driver in use: snd_hda_intel
0000:c3:00.0 VGA compatible controller [0300]: ASPEED Technology, Inc. Graphics [1a03:2000]
0000:00:00.0 Host bridge [0600]: Advanced Micro Devices, Inc. [AMD] Root Complex [1022:14a4]
"""


def port(a: str = "-", b: str = "-", c: str = "-") -> str:
    return PORT.format(a=a, b=b, c=c)


def gpu(width: int = 16, driver: str = "nvidia") -> str:
    return GPU.format(width=width, driver=driver)


def test_gpus_are_those_of_nvidia_and_neither_sound_nor_other_makers() -> None:
    facts = parse_lspci(port() + gpu() + OTHERS)
    assert [(one.address, one.driver) for one in facts.gpus] == [("0000:41:00.0", "nvidia")]
    assert not facts.denied


def test_idle_speed_is_no_fault_and_lanes_are_the_boards() -> None:
    assert parse_lspci(gpu(width=8)).gpus[0].link_width == 8
    assert parse_lspci(gpu(width=8)).gpus[0].link_width_max == 16


@pytest.mark.parametrize(
    ("flags", "redirect"),
    [
        (("-", "-", "-"), ()),
        (("+", "-", "-"), ()),  # source validation alone sends nothing elsewhere
        (("+", "+", "-"), ("ReqRedir",)),
        (("-", "-", "+"), ("CmpltRedir",)),
        (("+", "+", "+"), ("ReqRedir", "CmpltRedir")),
    ],
)
def test_acs_redirect_is_what_is_on_and_not_what_is_possible(
    flags: tuple[str, str, str], redirect: tuple[str, ...]
) -> None:
    ports = parse_lspci(port(*flags) + gpu()).ports
    assert [(one.address, one.redirect) for one in ports] == [("0000:40:01.1", redirect)]


def test_who_is_no_root_is_denied_the_capabilities() -> None:
    denied = "".join(
        f"{block.splitlines()[0]}\n\tCapabilities: <access denied>\n" for block in (port(), gpu())
    )
    facts = parse_lspci(denied)
    assert facts.denied
    assert facts.ports == ()
    assert (len(facts.gpus), facts.gpus[0].link_width) == (1, None)


def test_a_line_that_is_no_device_is_passed_over() -> None:
    text = "lspci: a warning\n\tof two lines\n\n" + port() + "\n" + gpu()
    assert len(parse_lspci(text).gpus) == len(parse_lspci(text).ports) == 1


def test_addresses_without_a_domain_are_read_too() -> None:
    assert parse_lspci(gpu().removeprefix("0000:")).gpus[0].address == "41:00.0"


def test_without_lspci_the_kernel_is_asked(recorded: Callable[..., Reader]) -> None:
    device = "/sys/bus/pci/devices/0000:41:00.0"
    files = {
        f"{device}/class": "0x030200\n",
        f"{device}/vendor": "0x10de\n",
        f"{device}/device": "0x2bb5\n",
        f"{device}/uevent": "DRIVER=nvidia\nPCI_CLASS=30200\n",
        f"{device}/current_link_width": "8\n",
        f"{device}/max_link_width": "16\n",
        "/sys/bus/pci/devices/0000:41:00.1/class": "0x040300\n",
        "/sys/bus/pci/devices/0000:41:00.1/vendor": "0x10de\n",
    }
    facts = read_pci(recorded(files))
    assert not isinstance(facts, Missing)
    assert facts.gpus == (PciGpu("0000:41:00.0", "0x2bb5", "nvidia", 8, 16),)
    assert facts.denied  # of ACS nothing is known


def test_lanes_that_the_kernel_does_not_know_are_not_known(recorded: Callable[..., Reader]) -> None:
    device = "/sys/bus/pci/devices/0000:41:00.0"
    files = {f"{device}/class": "0x030000\n", f"{device}/vendor": "0x10de\n",
             f"{device}/max_link_width": "Unknown\n"}  # fmt: skip
    facts = read_pci(recorded(files))
    assert not isinstance(facts, Missing)
    assert facts.gpus == (PciGpu("0000:41:00.0", "", None, None, None),)


def test_an_lspci_that_hangs_is_not_gone_round(recorded: Callable[..., Reader]) -> None:
    hung = Missing("lspci did not answer in 20 s", hung=True)
    assert read_pci(recorded(said={"lspci": hung})) == hung


def test_the_whole_text_is_asked_for(recorded: Callable[..., Reader]) -> None:
    facts = read_pci(recorded(said={"lspci -D -nn -vvv": Output(0, port() + gpu())}))
    assert not isinstance(facts, Missing)
    assert len(facts.gpus) == len(facts.ports) == 1
