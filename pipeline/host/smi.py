"""`nvidia-smi -q` as the same facts that NVML gives, for hosts that are read from afar."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.host.gpus import Gpu, GpuFacts, GpuProcess
from pipeline.host.reader import Missing, Reader

_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]+)?")
_PID = re.compile("[0-9]{1,10}")


def read_smi(reader: Reader, *, seconds: float = 30.0) -> GpuFacts:
    """The GPUs by `nvidia-smi -q`. Never raises: what goes wrong is in `problem`."""
    output = reader.command("nvidia-smi", "-q", seconds=seconds)
    if isinstance(output, Missing):
        code = "HOST-GPU-HUNG" if output.hung else "HOST-GPU-DRIVER"
        said = f"{output.reason}: driver hung" if output.hung else f"no driver ({output.reason})"
        return GpuFacts((), None, said, code)
    return parse_smi(output.text + output.error, status=output.status)


def parse_smi(text: str, *, status: int = 0) -> GpuFacts:
    """From what `nvidia-smi -q` printed and the status that it ended with."""
    if "version mismatch" in text:
        said = "; ".join(text.strip().splitlines())
        return GpuFacts((), None, said, "HOST-GPU-MISMATCH")
    if status != 0:
        said = (text.strip().splitlines() or ["no message"])[0]
        return GpuFacts((), None, f"nvidia-smi ended with {status}: {said}", "HOST-GPU-DRIVER")
    tree = _tree(text)
    cards = [(key[4:], value) for key, value in _pairs(tree) if key.startswith("GPU ")]
    read = [(bus, _gpu(index, bus, card)) for index, (bus, card) in enumerate(cards)]
    return GpuFacts(
        tuple(gpu for _, gpu in read if gpu is not None),
        _text(tree, "Driver Version"),
        None,
        lost=tuple(f"GPU {bus}: its memory is not told" for bus, gpu in read if gpu is None),
    )


def _gpu(index: int, bus: str, card: Mapping[str, Any]) -> Gpu | None:
    """None where it does not say what of its memory is used: that is not 0."""

    def number(*path: str) -> int | None:
        found = _NUMBER.match(_text(card, *path) or "")
        return round(float(found[0])) if found else None

    used, total = number("FB Memory Usage", "Used"), number("FB Memory Usage", "Total")
    if used is None or total is None:
        return None
    return Gpu(
        index=index,
        name=_text(card, "Product Name") or "",
        used_mib=used,
        total_mib=total,
        processes=tuple(_processes(card)),
        bus=bus.lower()[-12:],
        bar1_mib=number("BAR1 Memory Usage", "Total"),
        mig_current=_switch(card, "MIG Mode", "Current"),
        mig_pending=_switch(card, "MIG Mode", "Pending"),
        persistence=_switch(card, "Persistence Mode"),
        power_limit_watts=number("GPU Power Readings", "Current Power Limit"),
        link_width=number("PCI", "GPU Link Info", "Link Width", "Current"),
        link_width_max=number("PCI", "GPU Link Info", "Link Width", "Max"),
    )


def _switch(card: Mapping[str, Any], *path: str) -> bool | None:
    # A model without MIG says N/A: nothing that could be on.
    return {"Enabled": True, "Disabled": False, "N/A": False}.get(_text(card, *path) or "")


def _processes(card: Mapping[str, Any]) -> Iterator[GpuProcess]:
    for key, value in _pairs(card.get("Processes", {})):
        if key.startswith("Process ID"):
            pid = _PID.fullmatch(_text(value) or "")
            used = _NUMBER.match(_text(value, "Used GPU Memory") or "")
            name = _text(value, "Name") or ""
            shown = "" if name == "[Not Found]" else name
            yield GpuProcess(int(pid[0]) if pid else 0, round(float(used[0])) if used else 0, shown)


def _text(tree: Any, *path: str) -> str | None:
    for key in path:
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    if isinstance(tree, Mapping):
        tree = tree.get("")
    return tree if isinstance(tree, str) else None


def _pairs(tree: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a level; keys that stand there more than once end with #2, #3."""
    if isinstance(tree, Mapping):
        yield from tree.items()


def _tree(text: str) -> dict[str, Any]:
    """Indented `key : value` lines as mappings; a line's own value is at the key ''."""
    root: dict[str, Any] = {}
    levels: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    for line in text.splitlines():
        if not line.strip() or line.startswith("="):
            continue
        indent = len(line) - len(line.lstrip())
        # A value is set off by a blank and a colon; the colons of a bus address stand alone.
        key, colon, value = line.strip().partition(" : ")
        while levels[-1][0] >= indent:
            levels.pop()
        here: dict[str, Any] = {"": value.strip()} if colon else {}
        above = levels[-1][1]
        name = key.strip()
        count = sum(1 for known in above if known.partition("#")[0] == name)
        above[f"{name}#{count + 1}" if count else name] = here
        levels.append((indent, here))
    return root
