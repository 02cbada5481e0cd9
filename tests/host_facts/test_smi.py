import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.host.gpus import GpuProcess
from pipeline.host.reader import HostReader, Missing, Output, Reader
from pipeline.host.smi import parse_smi, read_smi

pytestmark = pytest.mark.usefixtures("simulated")

CARD = """
GPU 00000000:{bus}:00.0
    Product Name                          : NVIDIA RTX PRO 6000 Blackwell Server Edition
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Disabled
        Pending                           : {pending}
    PCI
        Bus                               : 0x{bus}
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 1
            Link Width
                Max                       : 16x
                Current                   : {width}
    FB Memory Usage
        Total                             : 97887 MiB
        Reserved                          : 636 MiB
        Used                              : {used} MiB
        Free                              : 97251 MiB
    BAR1 Memory Usage
        Total                             : {bar1} MiB
        Used                              : 1 MiB
    GPU Power Readings
        Current Power Limit               : 600.00 W
        Max Power Limit                   : 600.00 W
    Processes{processes}
"""
HEAD = """
==============NVSMI LOG==============

Timestamp                                 : Sun Nov 29 22:00:00 2026
Driver Version                            : 580.95.05
CUDA Version                              : 13.0

Attached GPUs                             : 2"""
PROCESS = """
        GPU instance ID                   : N/A
        Process ID                        : {pid}
            Type                          : C
            Name                          : {name}
            Used GPU Memory               : {used} MiB"""


def card(bus: str = "41", **changes: str) -> str:
    plain = {"pending": "Disabled", "width": "16x", "used": "0", "bar1": "131072"}
    return CARD.format(bus=bus, **{**plain, "processes": " : None", **changes})


def test_two_idle_gpus_are_told_as_nvml_tells_them() -> None:
    facts = parse_smi(HEAD + card("41") + card("C1"))
    assert (facts.driver, facts.problem) == ("580.95.05", None)
    first, second = facts.gpus
    assert (first.index, first.bus, second.index, second.bus) == (
        0, "0000:41:00.0", 1, "0000:c1:00.0",
    )  # fmt: skip
    assert (first.used_mib, first.total_mib, first.bar1_mib) == (0, 97887, 131072)
    assert (first.persistence, first.mig_current, first.mig_pending) == (True, False, False)
    assert (first.power_limit_watts, first.link_width, first.link_width_max) == (600, 16, 16)
    assert first.processes == ()
    assert first.name == "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def test_small_bar1_pending_mig_and_few_lanes_are_seen() -> None:
    gpu = parse_smi(HEAD + card(bar1="256", pending="Enabled", width="8x")).gpus[0]
    assert (gpu.bar1_mib, gpu.mig_pending, gpu.link_width) == (256, True, 8)


def test_a_model_without_mig_has_it_off() -> None:
    assert parse_smi(HEAD + card(pending="N/A")).gpus[0].mig_pending is False


def test_every_process_is_told_and_one_of_another_namespace_without_a_name() -> None:
    listed = PROCESS.format(pid=11, name="python", used=600)
    listed += PROCESS.format(pid=12, name="[Not Found]", used=90000)
    gpu = parse_smi(HEAD + card(processes=listed, used="90600")).gpus[0]
    assert gpu.processes == (GpuProcess(11, 600, "python"), GpuProcess(12, 90000, ""))
    assert gpu.used_mib == 90600


def test_a_gpu_that_does_not_tell_its_memory_is_lost_and_not_empty() -> None:
    silent = card("C1").replace("Used                              : 0 MiB", "Used : Unknown Error")
    facts = parse_smi(HEAD + card("41") + silent)
    assert [gpu.bus for gpu in facts.gpus] == ["0000:41:00.0"]
    assert facts.lost == ("GPU 00000000:C1:00.0: its memory is not told",)


MISMATCH = """Failed to initialize NVML: Driver/library version mismatch
NVML library version: 580.105
"""


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (Output(18, MISMATCH), "HOST-GPU-MISMATCH", "mismatch; NVML library version: 580.105"),
        (Output(6, "\nNo devices were found\nmore\n"), "HOST-GPU-DRIVER", "with 6: No devices"),
        (Output(9, "", "NVIDIA-SMI has failed"), "HOST-GPU-DRIVER", "NVIDIA-SMI has failed"),
        (Output(9, ""), "HOST-GPU-DRIVER", "with 9: no message"),
        (Missing("nvidia-smi did not answer", hung=True), "HOST-GPU-HUNG", "driver hung"),
        (Missing("nvidia-smi: No such file"), "HOST-GPU-DRIVER", "no driver (nvidia-smi: No such"),
    ],
)
def test_a_driver_that_does_not_answer_has_its_code(
    recorded: Callable[..., Reader], output: Output | Missing, code: str, said: str
) -> None:
    facts = read_smi(recorded(said={"nvidia-smi -q": output}))
    assert (facts.gpus, facts.code) == ((), code)
    assert said in (facts.problem or "")


def test_an_nvidia_smi_that_hangs_is_a_result_within_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nsleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    started = time.monotonic()
    facts = read_smi(HostReader(), seconds=0.5)
    assert time.monotonic() - started < 10
    assert facts.code == "HOST-GPU-HUNG"
    assert facts.problem == "nvidia-smi did not answer in 0.5 s: driver hung"
