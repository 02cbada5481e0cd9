"""The lock of the CPU server's packages."""

import re
from pathlib import Path

EXTRACTOR = Path(__file__).parents[2] / "docker" / "extractor"


def pins(name: str) -> list[str]:
    text = (EXTRACTOR / name).read_text(encoding="utf-8")
    return re.findall(r"^([A-Za-z0-9._-]+==[^\s\\]+)", text, re.MULTILINE)


def test_every_pin_is_locked_by_hash() -> None:
    assert pins("requirements-cpu.txt") == pins("requirements-cpu.in")
    blocks = re.split(r"\n(?=\S)", (EXTRACTOR / "requirements-cpu.txt").read_text(encoding="utf-8"))
    assert len(pins("requirements-cpu.in")) == 106
    for block in blocks:
        assert block.startswith("#") or "--hash=sha256:" in block, block
