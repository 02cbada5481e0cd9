"""PCI as `lspci -D -nn -vvv` shows it: the GPUs, their links, and ACS of the ports above them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.host.reader import Missing, Reader

_DEVICE = re.compile(
    r"^(?P<address>(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) "
    r"(?P<kind>.*?) \[(?P<class>[0-9a-f]{4})\]: (?P<name>.*)$"
)
_VENDOR = re.compile(r"\[10de:[0-9a-f]{4}\]")
_WIDTH = re.compile(r"Width x([0-9]{1,4})")
_LANES = re.compile(r"^([0-9]{1,4})$")  # as /sys has them
_GPU_CLASSES = ("0300", "0302")  # VGA, and 3D controllers without an output
_BRIDGE_CLASS = "0604"
_ACCESS_DENIED = "Capabilities: <access denied>"


@dataclass(frozen=True)
class PciGpu:
    """One NVIDIA GPU on the bus. driver: the kernel module that has it, None where none does."""

    address: str
    name: str
    driver: str | None
    link_width: int | None
    link_width_max: int | None


@dataclass(frozen=True)
class Port:
    """A root or switch port with ACS. redirect: flags that send peer traffic to the IOMMU."""

    address: str
    name: str
    redirect: tuple[str, ...]


@dataclass(frozen=True)
class PciFacts:
    """denied: lspci was not allowed to read capabilities, so ports (and widths) are not known."""

    gpus: tuple[PciGpu, ...]
    ports: tuple[Port, ...]
    denied: bool


def read_pci(reader: Reader) -> PciFacts | Missing:
    """By lspci; without one, GPUs and widths by /sys and nothing of ACS (denied)."""
    output = reader.command("lspci", "-D", "-nn", "-vvv", seconds=20.0)
    if isinstance(output, Missing) and output.hung:
        return output
    if isinstance(output, Missing) or output.status != 0:
        return _from_sys(reader)
    return parse_lspci(output.text)


def parse_lspci(text: str) -> PciFacts:
    """From the text of `lspci -D -nn -vvv`; without -D, addresses have no domain."""
    gpus, ports, denied = [], [], False
    for block in _blocks(text):
        first = _DEVICE.match(block[0])
        if first is None:
            continue
        address, name = first["address"], first["name"]
        hidden = any(_ACCESS_DENIED in line for line in block)
        if first["class"] in _GPU_CLASSES and _VENDOR.search(name):
            denied |= hidden
            driver = _after(block, "Kernel driver in use:")
            width = _number(_WIDTH, _after(block, "LnkSta:"))
            most = _number(_WIDTH, _after(block, "LnkCap:"))
            gpus.append(PciGpu(address, name, driver, width, most))
        elif first["class"] == _BRIDGE_CLASS:
            denied |= hidden
            if (control := _after(block, "ACSCtl:")) is not None:
                on = [flag[:-1] for flag in control.split() if flag.endswith("+")]
                redirect = tuple(flag for flag in on if flag in ("ReqRedir", "CmpltRedir"))
                ports.append(Port(address, name, redirect))
    return PciFacts(tuple(gpus), tuple(ports), denied)


def _blocks(text: str) -> Iterable[list[str]]:
    block: list[str] = []
    for line in text.splitlines():
        if line and not line[0].isspace():
            if block:
                yield block
            block = [line]
        elif block and line.strip():
            block.append(line.strip())
    if block:
        yield block


def _after(block: Iterable[str], label: str) -> str | None:
    for line in block:
        if line.startswith(label):
            return line.removeprefix(label).strip()
    return None


def _number(pattern: re.Pattern[str], text: str | None) -> int | None:
    found = pattern.search(text or "")
    return int(found[1]) if found else None


def _from_sys(reader: Reader) -> PciFacts | Missing:
    folder = "/sys/bus/pci/devices"
    addresses = reader.names(folder)
    if isinstance(addresses, Missing):
        return addresses
    gpus = []
    for address in addresses:
        device = f"{folder}/{address}"
        kind, vendor = _word(reader, f"{device}/class"), _word(reader, f"{device}/vendor")
        if vendor == "0x10de" and kind is not None and kind[2:6] in _GPU_CLASSES:
            event = reader.text(f"{device}/uevent")
            lines = [] if isinstance(event, Missing) else event.splitlines()
            width = _word(reader, f"{device}/current_link_width")
            most = _word(reader, f"{device}/max_link_width")
            gpus.append(
                PciGpu(
                    address,
                    _word(reader, f"{device}/device") or "",
                    _after(lines, "DRIVER="),
                    _number(_LANES, width),
                    _number(_LANES, most),
                )
            )
    return PciFacts(tuple(gpus), (), denied=True)


def _word(reader: Reader, path: str) -> str | None:
    text = reader.text(path)
    return None if isinstance(text, Missing) else text.strip()
