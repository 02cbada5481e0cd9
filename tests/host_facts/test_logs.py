from collections.abc import Callable

import pytest

from pipeline.host.logs import Event, from_the_start, parse_events, read_events
from pipeline.host.reader import Missing, Output, Reader

pytestmark = pytest.mark.usefixtures("simulated")

FIRST = "[    0.000000] Linux version 6.1.0-40-amd64 (debian-kernel@lists.debian.org)\n"
LOADED = "[   12.400000] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\n"
XID = (
    "[ 5210.000000] NVRM: Xid (PCI:0000:C1:00): 79, pid='<unknown>', name=<unknown>, GPU has "
    "fallen off the bus.\n"
)
JOURNAL = "journalctl --dmesg --boot"


def test_an_xid_is_told_with_bus_and_number() -> None:
    assert parse_events(FIRST + LOADED + XID) == (Event("0000:c1:00", 79, XID.strip()),)


@pytest.mark.parametrize(
    "line",
    [
        "kernel: NVRM: GPU at PCI:0000:41:00: GSP has halted",
        "kernel: NVRM: kgspHealthCheck_TU102: **** GSP Crash Report ****",
        "kernel: NVRM: _kgspRpcRecvPoll: GSP RM heartbeat timed out",
    ],
)
def test_a_halt_of_the_gpus_system_processor_is_told(line: str) -> None:
    assert [event.number for event in parse_events(line)] == [None]


def test_a_loading_driver_is_no_event() -> None:
    assert parse_events(FIRST + LOADED + "NVRM: GSP firmware 580.95.05 loaded\n") == ()


def test_a_log_goes_back_to_the_start_by_its_first_time() -> None:
    assert from_the_start("-- Journal begins --\n" + FIRST)
    assert not from_the_start(LOADED)
    assert not from_the_start("-- No entries --\n")


@pytest.mark.parametrize(
    ("said", "events"),
    [
        ({JOURNAL: FIRST}, ()),
        ({JOURNAL: FIRST + XID}, (79,)),
        ({JOURNAL: "-- No entries --\n", "dmesg": FIRST}, ()),
        ({JOURNAL: Output(1, "", "No journal files"), "dmesg": FIRST + XID}, (79,)),
        ({"dmesg": LOADED + XID}, (79,)),  # what is there is there, whatever came before
    ],
)
def test_journal_then_dmesg(
    recorded: Callable[..., Reader], said: dict[str, Output | str], events: tuple[int, ...]
) -> None:
    found = read_events(recorded(said=said))
    assert not isinstance(found, Missing)
    assert tuple(event.number for event in found) == events


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, "dmesg: No such file"),
        ({JOURNAL: "-- No entries --\n", "dmesg": Output(1, "", "Operation not permitted")},
         "dmesg: Operation not permitted"),
        ({"dmesg": LOADED}, "dmesg does not go back to the start"),
        ({JOURNAL: LOADED}, "No such file"),
    ],
)  # fmt: skip
def test_silence_that_proves_nothing_is_missing(
    recorded: Callable[..., Reader], said: dict[str, Output | str], reason: str
) -> None:
    found = read_events(recorded(said=said))
    assert isinstance(found, Missing)
    assert reason in found.reason
