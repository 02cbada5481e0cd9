"""The running kernel, those that are installed, and what is built for them."""

import re
from dataclasses import dataclass

from pipeline.host.reader import Missing, Reader

_DKMS = re.compile(
    r"^(?P<name>[^/,\s]+)[/,]\s*(?P<version>[^,]+), (?P<kernel>[^,]+), [^:]+: (?P<state>\w+)"
)


@dataclass(frozen=True)
class Build:
    """One line of `dkms status`. state: added, built or installed."""

    module: str
    version: str
    kernel: str
    state: str


@dataclass(frozen=True)
class KernelFacts:
    """installed: releases with an image in /boot, oldest first; headers: those with headers."""

    command_line: tuple[str, ...] | Missing
    running: str | Missing
    installed: tuple[str, ...] | Missing
    headers: tuple[str, ...]
    dkms: tuple[Build, ...] | Missing

    @property
    def to_serve(self) -> tuple[str, ...]:
        """The running and the newest installed kernel: what runs now and what boots next."""
        found = [] if isinstance(self.running, Missing) else [self.running]
        if not isinstance(self.installed, Missing):
            found += self.installed[-1:]
        return tuple(dict.fromkeys(found))


def read_kernel(reader: Reader) -> KernelFacts:
    """Each fact on its own."""
    line, running = reader.text("/proc/cmdline"), reader.text("/proc/sys/kernel/osrelease")
    boot, modules = reader.names("/boot"), reader.names("/lib/modules")
    headers = () if isinstance(modules, Missing) else modules
    dkms = reader.command("dkms", "status")
    return KernelFacts(
        command_line=line if isinstance(line, Missing) else tuple(line.split()),
        running=running if isinstance(running, Missing) else running.strip(),
        installed=boot if isinstance(boot, Missing) else installed_kernels(boot),
        headers=tuple(
            release
            for release in headers
            if not isinstance(reader.entry(f"/lib/modules/{release}/build"), Missing)
        ),
        dkms=dkms if isinstance(dkms, Missing) else parse_dkms(dkms.text),
    )


def installed_kernels(boot: tuple[str, ...]) -> tuple[str, ...]:
    """Releases of the images in /boot, by version: 6.1.0-9 is older than 6.1.0-40."""
    releases = [
        name.removeprefix("vmlinuz-")
        for name in boot
        if name.startswith("vmlinuz-") and not name.endswith((".old", ".dpkg-bak"))
    ]
    return tuple(sorted(releases, key=_version))


def parse_dkms(text: str) -> tuple[Build, ...]:
    """From `dkms status`, of dkms 2 (`nvidia, 580...`) and 3 (`nvidia/580...`)."""
    found = (_DKMS.match(line) for line in text.splitlines())
    return tuple(
        Build(one["name"], one["version"], one["kernel"], one["state"]) for one in found if one
    )


def _version(release: str) -> tuple[tuple[int, ...], str]:
    return tuple(map(int, re.findall(r"[0-9]{1,18}", release))), release
