import pytest

from pipeline.training.flow import Flow, FlowMeter


def flow(*, waited: float) -> Flow:
    return Flow(
        seconds=10.0,
        taken_bytes=20 * 10**9,
        read_bytes=21 * 10**9,
        reading_seconds=36.0,
        waited_seconds=waited,
        threads=4,
    )


def test_wanted_is_what_had_been_taken_without_waiting() -> None:
    slow = flow(waited=5.0)
    assert (slow.waiting, slow.got, slow.wanted) == (0.5, 2000.0, 4000.0)
    assert slow.line() == (
        "data: waited 50% of the time: 4,000 MB/s wanted, 2,000 MB/s got (readers busy 90%)"
    )


@pytest.mark.parametrize(("waited", "said"), [(0.0, False), (0.2, False), (0.21, True)])
def test_two_percent_is_still_nothing_to_speak_of(waited: float, said: bool) -> None:
    assert (flow(waited=waited).line() is not None) is said


def test_no_time_is_no_flow() -> None:
    nothing = Flow(0.0, 0, 0, 0.0, 0.0, 4)
    assert (nothing.waiting, nothing.got, nothing.wanted, nothing.line()) == (0.0, 0.0, 0.0, None)


def test_a_meter_begins_anew_when_asked() -> None:
    meter = FlowMeter(threads=2)
    meter.read(100, seconds=0.5)
    meter.read(50, seconds=0.25)
    meter.took(120)
    meter.waited(0.125)
    first, second = meter.flow(), meter.flow()
    assert (first.read_bytes, first.reading_seconds) == (150, 0.75)
    assert (first.taken_bytes, first.waited_seconds, first.threads) == (120, 0.125, 2)
    assert first.seconds > 0
    assert (second.read_bytes, second.taken_bytes, second.waited_seconds) == (0, 0, 0.0)
