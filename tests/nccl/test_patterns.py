"""What ranks send is exact in its dtype, and nothing but the right numbers passes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.nccl.cases import CASES, SIMULATED_CASES, Case
from pipeline.nccl.patterns import Pattern, first_wrong

CPU = torch.device("cpu")


def case(operation: str = "all_reduce", dtype: str = "bfloat16", size_bytes: int = 2048) -> Case:
    return Case("extraction", operation, dtype, size_bytes, 1, batch=2, samples=1)  # type: ignore[arg-type]


def patterns(one: Case, world: int) -> list[Pattern]:
    return [Pattern(one, rank=rank, world=world, device=CPU) for rank in range(world)]


def added_up(one: Case, world: int, round_: int) -> torch.Tensor:
    total = torch.zeros(one.batch, one.elements(world), dtype=torch.float64)
    for pattern in patterns(one, world):
        total += pattern.sent(round_).double()
    return total


@given(
    world=st.integers(2, 64),
    round_=st.integers(0, 30),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_sums_are_whole_numbers_that_the_dtype_holds(world: int, round_: int, dtype: str) -> None:
    one = case(dtype=dtype)
    wanted = patterns(one, world)[0].wanted(round_)
    assert torch.equal(wanted.double(), added_up(one, world, round_))  # not rounded
    assert wanted.max() <= (256 if dtype == "bfloat16" else 1 << 24)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_scattered_sum_is_the_own_part_of_the_sum(world: int) -> None:
    one = case("reduce_scatter", "float32")
    part = one.elements(world) // world
    for rank, pattern in enumerate(patterns(one, world)):
        own = added_up(one, world, 3)[:, rank * part : (rank + 1) * part]
        assert torch.equal(pattern.wanted(3).double(), own)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_gather_is_every_rank_s_own_part_in_order(world: int) -> None:
    made = patterns(case("all_gather"), world)
    whole = torch.cat([pattern.sent(1) for pattern in made], dim=1)
    assert all(torch.equal(pattern.wanted(1), whole) for pattern in made)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_an_exchange_is_what_each_rank_has_for_this_one(world: int) -> None:
    made = patterns(case("all_to_all"), world)
    for rank, pattern in enumerate(made):
        parts = [other.sent(1).chunk(world, dim=1)[rank] for other in made]
        assert torch.equal(pattern.wanted(1), torch.cat(parts, dim=1))


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("one", [*SIMULATED_CASES, *(replace(c, size_bytes=4096) for c in CASES)])
def test_ranks_rounds_and_neighbours_send_other_numbers(one: Case, world: int) -> None:
    small = replace(one, size_bytes=4096)
    first, second = patterns(small, world)[:2]
    assert (first.sent(0) != second.sent(0)).float().mean() > 0.5
    assert (first.sent(0) != first.sent(1)).all()
    assert (first.sent(0)[:, 1:] != first.sent(0)[:, :-1]).all()
    assert first_wrong(first.wanted(1), first.wanted(0)) is not None


@given(place=st.integers(0, 2047), change=st.sampled_from([1.0, -1.0, math.nan, math.inf]))
def test_any_changed_number_is_noticed(place: int, change: float) -> None:
    wanted = patterns(case(), 2)[0].wanted(0)
    found = wanted.clone()
    found.view(-1)[place] += change
    said = first_wrong(found, wanted)
    assert said is not None
    assert said.startswith(f"element {place % 1024} of message {place // 1024} is ")
    assert said.endswith("; 1 of 2048 are wrong")
