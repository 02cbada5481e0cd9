"""The messages: sizes, bus bytes and names."""

import pytest

from pipeline.nccl.cases import CASES, SIMULATED_CASES, USES, Case, size_text


@pytest.mark.parametrize(
    ("operation", "world", "wanted"),
    [
        ("all_reduce", 2, 1000),  # every byte is sent once and received once, added up and as sum
        ("all_reduce", 8, 1750),
        ("reduce_scatter", 2, 500),
        ("reduce_scatter", 8, 875),
        ("all_gather", 8, 875),
        ("all_to_all", 8, 875),
    ],
)
def test_bus_bytes_are_what_one_link_carries(operation: str, world: int, wanted: float) -> None:
    case = Case("training", operation, "float32", 1000, 1, batch=1, samples=1)  # type: ignore[arg-type]
    assert case.bus_bytes(world) == wanted


@pytest.mark.parametrize("world", [2, 3, 7, 8])
def test_every_rank_has_an_equal_part(world: int) -> None:
    assert all(case.elements(world) % world == 0 for case in CASES)


@pytest.mark.parametrize("cases", [CASES, SIMULATED_CASES])
def test_cases_of_both_uses_have_names_of_their_own(cases: tuple[Case, ...]) -> None:
    assert len({case.key for case in cases}) == len(cases)
    assert {case.use for case in cases} == {*USES}


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(4096, "4 KiB"), (112 << 20, "112 MiB"), (200_000_000, "200 MB"), (1000, "1000 B")],
)
def test_sizes_are_named_by_their_unit(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
