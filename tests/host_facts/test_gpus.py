import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.host.gpus import Gpu, GpuFacts, GpuProcess, read_gpus

Nvml = Callable[..., GpuFacts]


@pytest.fixture
def nvml(tmp_path: Path, simulated: str) -> Nvml:
    """Reads through the real child process, in which NVML is a stand-in."""

    def read(**scene: object) -> GpuFacts:
        shutil.copy(Path(__file__).with_name("simulated_nvml.py"), tmp_path / "pynvml.py")
        (tmp_path / "scene.json").write_text(json.dumps(scene))
        script = (
            f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); "
            "runpy.run_module('pipeline.host.gpus', run_name='__main__')"
        )
        return read_gpus(command=(sys.executable, "-c", script))

    return read


def test_an_idle_gpu_is_told_whole(nvml: Nvml) -> None:
    name = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    idle = Gpu(0, name, 0, 97887, (), "0000:c1:00.0", 131072, False, False, True, 600, 16, 16)
    assert nvml() == GpuFacts((idle,), "580.95.05", None)


def test_mig_that_waits_for_a_reset_is_pending(nvml: Nvml) -> None:
    gpu = nvml(mig=[0, 1]).gpus[0]
    assert (gpu.mig_current, gpu.mig_pending) == (False, True)


def test_a_model_without_mig_has_it_off(nvml: Nvml) -> None:
    gpu = nvml(errors={"mig": [3, "Not Supported"]}).gpus[0]
    assert (gpu.mig_current, gpu.mig_pending) == (False, False)


def test_what_nvml_does_not_tell_is_not_known(nvml: Nvml) -> None:
    errors = {"mig": [4, "Insufficient Permissions"], "bar1": [999, "Unknown Error"]}
    gpu = nvml(errors=errors).gpus[0]
    assert (gpu.mig_current, gpu.bar1_mib) == (None, None)


def test_a_holder_is_told_with_its_command(nvml: Nvml) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        facts = nvml(processes=[[sleeper.pid, 600 << 20]], used_mib=610)
        sleeper.kill()
    assert facts.gpus[0].processes == (GpuProcess(sleeper.pid, 600, "sleep 60"),)
    assert facts.gpus[0].used_mib == 610


def test_a_holder_of_another_namespace_has_no_command(nvml: Nvml) -> None:
    unseen = (1 << 22) + 7  # above the largest PID there can be
    assert nvml(processes=[[unseen, None]]).gpus[0].processes == (GpuProcess(unseen, 0, ""),)


def test_a_use_that_nvml_may_not_tell_is_no_exabyte(nvml: Nvml) -> None:
    facts = nvml(processes=[[os.getpid(), (1 << 64) - 1]])
    assert facts.gpus[0].processes[0].used_mib == 0


def test_a_worker_whose_launcher_died_is_an_orphan(nvml: Nvml) -> None:
    started = subprocess.run(
        ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    pid = int(started.stdout)
    deadline = time.monotonic() + 10
    while not (found := nvml(processes=[[pid, 1 << 20]]).gpus[0].processes[0]).orphan:
        assert time.monotonic() < deadline, found
    os.kill(pid, 9)


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("HOST-GPU-MISMATCH", [18, "RM has detected an NVML/RM version mismatch."], "two versions"),
        ("HOST-GPU-DRIVER", [9, "Driver Not Loaded"], "no NVIDIA driver: Driver Not Loaded"),
        ("HOST-GPU-DRIVER", [999, "Unknown Error"], "Unknown Error"),
    ],
)
def test_a_driver_that_does_not_start_has_its_code(
    nvml: Nvml, code: str, error: list[object], said: str
) -> None:
    facts = nvml(errors={"init": error})
    assert (facts.gpus, facts.code) == ((), code)
    assert said in (facts.problem or "")


def test_a_gpu_that_fell_off_the_bus_is_lost_and_the_others_are_told(nvml: Nvml) -> None:
    facts = nvml(count=3, errors={"handle.1": [15, "GPU is lost"]})
    assert [gpu.index for gpu in facts.gpus] == [0, 2]
    assert facts.lost == ("GPU 1: GPU is lost",)


def test_a_driver_that_hangs_is_a_result_within_its_time(simulated: str) -> None:
    started = time.monotonic()
    sleeping = (sys.executable, "-c", "import time; time.sleep(60)")
    facts = read_gpus(timeout_seconds=0.5, command=sleeping)
    assert time.monotonic() - started < 10
    assert facts == GpuFacts((), None, "NVML did not answer in 0.5 s: driver hung", "HOST-GPU-HUNG")


def test_a_reader_that_crashes_is_a_result(simulated: str) -> None:
    facts = read_gpus(command=(sys.executable, "-c", "raise SystemExit('Traceback\\nboom\\n')"))
    assert facts.code == "HOST-GPU-DRIVER"
    assert facts.problem == "reading NVML ended with 1: boom"
