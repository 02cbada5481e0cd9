"""The locks of the extractor: SGLang for machines without a GPU, and for those with one."""

import re
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"
EXTRACTOR = DOCKER / "extractor"
VARIANTS = ["cpu", "cuda"]


def pins(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(r"^([A-Za-z0-9._-]+==[^\s\\]+)", text, re.MULTILINE)


def versions(variant: str) -> dict[str, str]:
    found = (pin.split("==") for pin in pins(EXTRACTOR / f"requirements-{variant}.txt"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_every_pin_of_the_cpu_server_is_locked() -> None:
    assert pins(EXTRACTOR / "requirements-cpu.txt") == pins(EXTRACTOR / "requirements-cpu.in")
    assert len(pins(EXTRACTOR / "requirements-cpu.in")) == 126


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pin_has_hashes(variant: str) -> None:
    text = (EXTRACTOR / f"requirements-{variant}.txt").read_text(encoding="utf-8")
    for block in re.split(r"\n(?=\S)", text):
        assert block.startswith("#") or "--hash=sha256:" in block, block


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stages_find_their_packages_beside_sglang(variant: str) -> None:
    lines = (DOCKER / "trainer" / "requirements.in").read_text(encoding="utf-8").splitlines()
    wanted = {re.split(r"[=<>]", line)[0] for line in lines if line and line[0] != "#"}
    assert wanted - versions(variant).keys() == set()


def test_both_variants_hold_the_same_versions() -> None:
    cpu, cuda = versions("cpu"), versions("cuda")
    differ = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert cpu["sglang"] == cuda["sglang"] == "0.5.23"
    assert differ == set()


def test_the_compiler_of_kernels_is_new_enough_for_sm120() -> None:
    compiler = tuple(int(part) for part in versions("cuda")["nvidia-cuda-nvcc"].split("."))
    assert compiler >= (12, 9)
