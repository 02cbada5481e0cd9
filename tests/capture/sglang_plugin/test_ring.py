import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.capture.sglang_plugin.ring import Region, Ring, StateCopier

UNIT = 512


def test_regions_are_rounded_up_to_the_alignment() -> None:
    ring = Ring(4 * UNIT)
    assert [(r.start, r.size) for r in (ring.take(1, timeout_seconds=0) for _ in range(2))] == [
        (0, UNIT),
        (UNIT, UNIT),
    ]


def test_more_than_the_ring_has_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="the ring has 1024"):
        Ring(2 * UNIT).take(2 * UNIT + 1, timeout_seconds=60)


def test_a_full_ring_makes_the_taker_wait_and_then_give_up() -> None:
    ring = Ring(2 * UNIT)
    ring.take(2 * UNIT, timeout_seconds=0)
    with pytest.raises(TimeoutError, match="no 512 free bytes"):
        ring.take(1, timeout_seconds=0.05)


def test_a_waiting_taker_goes_on_as_soon_as_there_is_room() -> None:
    ring = Ring(2 * UNIT)
    first = ring.take(2 * UNIT, timeout_seconds=0)
    threading.Timer(0.05, ring.give_back, [first]).start()
    began = time.monotonic()
    assert ring.take(UNIT, timeout_seconds=30).start == 0
    assert time.monotonic() - began < 10


def test_space_is_free_only_when_all_earlier_regions_are_back() -> None:
    ring = Ring(2 * UNIT)
    first, second = (ring.take(UNIT, timeout_seconds=0) for _ in range(2))
    ring.give_back(second)
    assert ring.taken_bytes == 2 * UNIT
    ring.give_back(first)
    assert ring.taken_bytes == 0


def test_a_region_is_contiguous_across_the_wrap() -> None:
    ring = Ring(4 * UNIT)
    first = ring.take(3 * UNIT, timeout_seconds=0)
    second = ring.take(UNIT, timeout_seconds=0)
    ring.give_back(first)
    assert ring.take(2 * UNIT, timeout_seconds=0).start == 0
    ring.give_back(second)


def test_giving_back_twice_is_refused() -> None:
    ring = Ring(UNIT)
    region = ring.take(UNIT, timeout_seconds=0)
    ring.give_back(region)
    with pytest.raises(ValueError, match="twice"):
        ring.give_back(region)


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.booleans(), st.integers(1, 12 * UNIT), st.integers(0, 99)), max_size=80),
)
def test_live_regions_never_overlap_and_all_comes_back(
    units: int, steps: list[tuple[bool, int, int]]
) -> None:
    ring = Ring(units * UNIT)
    live: list[Region] = []
    for give, wanted, which in steps:
        if give and live:
            ring.give_back(live.pop(which % len(live)))
            continue
        try:
            region = ring.take(wanted, timeout_seconds=0)
        except (TimeoutError, ValueError):
            continue
        assert region.size >= wanted
        assert region.start + region.size <= ring.size_bytes
        for other in live:
            apart = (
                other.start + other.size <= region.start
                or region.start + region.size <= other.start
            )
            assert apart
        live.append(region)
    for region in live:
        ring.give_back(region)
    assert ring.taken_bytes == 0
    ring.take(ring.size_bytes, timeout_seconds=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_piece_holds_the_asked_rows_as_bfloat16_bits(dtype: torch.dtype) -> None:
    copier = StateCopier(1 << 16, device=torch.device("cpu"))
    states = [torch.randn(10, 3).to(dtype) for _ in range(2)]
    ids = torch.arange(10) * 7
    copier.ready(states, ids)
    piece = copier.copy(states, ids, first_row=4, position=20, rows=5, timeout_seconds=1)
    piece.wait()
    for copied, state in zip(piece.states, states, strict=True):
        wanted = state[4:9].to(torch.bfloat16).view(torch.uint16).numpy()
        assert np.array_equal(copied, wanted)
    assert piece.ids.tolist() == [28, 35, 42, 49, 56]
    assert piece.position == 20


def test_a_piece_does_not_change_with_its_source() -> None:
    copier = StateCopier(1 << 16, device=torch.device("cpu"))
    states, ids = [torch.ones(2, 4, dtype=torch.bfloat16)], torch.zeros(2, dtype=torch.int64)
    piece = copier.copy(states, ids, first_row=0, position=0, rows=2, timeout_seconds=1)
    states[0].zero_()
    assert (piece.states[0] == 0x3F80).all()


def test_a_ring_too_small_for_the_batch_still_takes_it_in_pieces() -> None:
    copier = StateCopier(1 << 14, device=torch.device("cpu"))
    assert copier.rows_per_piece(1 << 10) == 4
    assert copier.rows_per_piece(1 << 20) == 1
