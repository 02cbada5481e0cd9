"""GPUs: on the bus, known to the driver, empty, and set as a ready host has them. Hardware."""

from collections.abc import Callable

import pytest

from pipeline.host.gpus import Gpu, GpuFacts
from pipeline.host.logs import read_events
from pipeline.host.lspci import PciFacts
from pipeline.host.reader import Missing
from pipeline.host.wanted import Wanted, WantedGpus
from tests.host.afar import AfarReader
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state


@pytest.fixture
def asked(wanted: Wanted) -> WantedGpus:
    if wanted.gpus is None:
        pytest.skip("gpus: not wanted")
    return wanted.gpus


@pytest.fixture
def gpus(driver: GpuFacts) -> tuple[Gpu, ...]:
    """GPUs of a driver that answers; where it does not, another test says so."""
    if driver.problem is not None:
        pytest.skip(f"nothing is known of the GPUs: {driver.problem}")
    return driver.gpus


def test_the_driver_answers(driver: GpuFacts) -> None:
    steps = {
        "HOST-GPU-HUNG": "end the jobs, reboot; do not try again in a loop",
        "HOST-GPU-MISMATCH": "reboot: the loaded module is older than the installed libraries",
        "HOST-GPU-DRIVER": by_role("nvidia_driver") + "; then look at dmesg",
    }
    if driver.code and driver.problem:
        refuse(
            driver.code,
            driver.problem,
            wanted="an answer of nvidia-smi",
            next_step=steps[driver.code],
        )


def test_all_gpus_are_on_the_bus(asked: WantedGpus, cards: PciFacts) -> None:
    if len(cards.gpus) != asked.count:
        refuse(
            "HOST-GPU-COUNT",
            f"{len(cards.gpus)} NVIDIA GPUs on the PCI bus: "
            + ", ".join(one.address for one in cards.gpus),
            wanted=f"{asked.count}",
            next_step="power the machine off and on; look at the seats, cables and firmware",
        )


def test_the_driver_has_every_gpu_of_the_bus(gpus: tuple[Gpu, ...], cards: PciFacts) -> None:
    if len(gpus) != len(cards.gpus):
        refuse(
            "HOST-GPU-COUNT",
            f"{len(gpus)} GPUs by nvidia-smi",
            wanted=f"{len(cards.gpus)}, as on the PCI bus",
            next_step="look for Xid and 'RmInitAdapter failed' in dmesg; open kernel modules are "
            "a must for Blackwell",
        )


def test_the_gpus_are_of_the_model(asked: WantedGpus, gpus: tuple[Gpu, ...]) -> None:
    if wrong := _those(gpus, "name", lambda gpu: not gpu.name.startswith(asked.name)):
        refuse(
            "HOST-GPU-MODEL",
            wrong,
            wanted=f"names that begin with {asked.name}",
            next_step="set ready_host.gpus.name for this machine, or use another",
        )


def test_the_gpus_have_their_memory(asked: WantedGpus, gpus: tuple[Gpu, ...]) -> None:
    if asked.memory_mib is None:
        pytest.skip("gpus.memory_mib: not wanted")
    if wrong := _those(gpus, "total_mib", lambda gpu: gpu.total_mib != asked.memory_mib):
        refuse(
            "HOST-GPU-MEMORY",
            wrong,
            wanted=f"{asked.memory_mib} MiB each",
            next_step="nvidia-smi -q -d ROW_REMAPPER,ECC; set ready_host.gpus.memory_mib if that "
            "is this model's size",
        )


def test_bar1_covers_the_memory(asked: WantedGpus, gpus: tuple[Gpu, ...]) -> None:
    least = asked.bar1_mib_at_least
    if least is None:
        pytest.skip("gpus.bar1_mib_at_least: not wanted")
    if wrong := _those(gpus, "bar1_mib", lambda gpu: (gpu.bar1_mib or 0) < least):
        refuse(
            "HOST-GPU-BAR1",
            wrong,
            wanted=f"{least} MiB or more: peer-to-peer fails with less",
            next_step="turn on resizable BAR and 'above 4G decoding' in the firmware",
        )


def test_no_process_holds_memory(asked: WantedGpus, gpus: tuple[Gpu, ...]) -> None:
    most = asked.idle_mib_at_most
    if most is None:
        pytest.skip("gpus.idle_mib_at_most: not wanted")
    held = [gpu for gpu in gpus if (gpu.used_mib or 0) > most]
    if held:
        refuse(
            "HOST-GPU-HELD",
            "; ".join(_holders(gpu) for gpu in held),
            wanted=f"{most} MiB used at most, with no stage running",
            next_step="end the processes; with none seen: a PID of another namespace, look on the "
            "host (fuser -v /dev/nvidia*), at containers, then at children of process 1",
        )


def test_mig_is_off_now_and_after_a_reset(asked: WantedGpus, gpus: tuple[Gpu, ...]) -> None:
    if asked.mig is None:
        pytest.skip("gpus.mig: not wanted")
    on = [gpu for gpu in gpus if gpu.mig_current or gpu.mig_pending]
    if on:
        refuse(
            "HOST-GPU-MIG",
            ", ".join(f"{gpu.bus} on: {gpu.mig_current}, pending: {gpu.mig_pending}" for gpu in on),
            wanted="both disabled",
            next_step=by_role("nvidia_driver") + "; a pending mode takes a reboot",
        )


def test_persistence_is_as_wanted(asked: WantedGpus, gpus: tuple[Gpu, ...]) -> None:
    if asked.persistence is None:
        pytest.skip("gpus.persistence: not wanted")
    if wrong := _those(gpus, "persistence", lambda gpu: gpu.persistence != asked.persistence):
        refuse(
            "HOST-GPU-PERSISTENCE",
            wrong,
            wanted=f"persistence {asked.persistence}",
            next_step=by_role("nvidia_driver"),
        )


def test_the_power_limit_is_as_wanted(asked: WantedGpus, gpus: tuple[Gpu, ...]) -> None:
    watts = asked.power_limit_watts
    if watts is None:
        pytest.skip("gpus.power_limit_watts: not wanted")
    if wrong := _those(
        gpus,
        "power_limit_watts",
        lambda gpu: gpu.power_limit_watts != watts,
    ):
        refuse(
            "HOST-GPU-POWER",
            wrong,
            wanted=f"{watts} W",
            next_step=by_role("nvidia_driver"),
        )


def test_every_gpu_has_all_its_lanes(cards: PciFacts) -> None:
    # Width only: an idle link is slow on purpose.
    narrow = [
        one
        for one in cards.gpus
        if one.link_width_max and (one.link_width or 0) < one.link_width_max
    ]
    if narrow:
        refuse(
            "HOST-GPU-LINK",
            ", ".join(f"{one.address} x{one.link_width or 0}" for one in narrow),
            wanted=", ".join(f"{one.address} x{one.link_width_max}" for one in narrow),
            next_step="reseat the card or its riser; look at the slot's lanes in the firmware",
        )


@pytest.mark.usefixtures("cards")
def test_no_gpu_failed_since_boot(reader: AfarReader) -> None:
    events = read_events(reader)
    if isinstance(events, Missing):
        pytest.skip(f"the kernel's log is not known: {events.reason}")
    if events:
        refuse(
            "HOST-GPU-XID",
            f"{len(events)} lines, the last: {events[-1].text}",
            wanted="no Xid and no halt of the GSP since boot",
            next_step="look the number up in NVIDIA's list of Xid errors; reboot; test the card",
        )


def _holders(gpu: Gpu) -> str:
    seen = ", ".join(f"PID {one.pid} {one.command} {one.used_mib} MiB" for one in gpu.processes)
    return f"{gpu.bus} {gpu.used_mib} MiB: {seen or 'by a PID that is not seen'}"


def _those(gpus: tuple[Gpu, ...], attribute: str, wrong: Callable[[Gpu], bool]) -> str:
    """The wrong ones with what they have; empty where none is."""
    return ", ".join(f"{gpu.bus} {getattr(gpu, attribute)}" for gpu in gpus if wrong(gpu))
