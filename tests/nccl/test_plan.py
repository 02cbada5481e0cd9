"""What is tried next, and who wins."""

from dataclasses import replace

import pytest

from pipeline.nccl.plan import Grid, Planned, confirmation, judge, pending
from pipeline.nccl.rows import Row
from tests.nccl.make import ONE_PROTOCOL, row, twice

LL = {"NCCL_PROTO": "LL"}
LOC = {"NCCL_P2P_LEVEL": "LOC"}
DEFAULTS = twice({}, 1.0, 1.01)


def winner(rows: list[Row], grid: Grid = ONE_PROTOCOL) -> dict[str, str] | None:
    return judge("extraction", rows, grid).environment


def to_the_end(seconds: dict[str, float], grid: Grid, use: str = "extraction") -> list[Row]:
    """Rows of a whole sweep; a variable with its value -> what it multiplies the seconds by."""
    rows: list[Row] = []
    while planned := pending(use, rows, grid):
        took = 1.0
        for name, value in planned[0].environment.items():
            took *= seconds.get(f"{name}={value}", 1.0)
        one = row(planned[0].environment, took, launch=planned[0].launch, use=use)
        rows.append(one)
    return rows


def test_the_default_is_launched_twice_before_anything_else() -> None:
    assert pending("extraction", [], Grid()) == [Planned({})]
    assert pending("extraction", [row({})], Grid()) == [Planned({}, 1)]
    assert Planned(LL) in pending("extraction", DEFAULTS, Grid())


def test_each_group_is_built_on_the_best_of_the_one_before() -> None:
    rows = to_the_end(
        {"NCCL_PROTO=Simple": 0.8, "NCCL_MIN_NCHANNELS=16": 0.9, "NCCL_BUFFSIZE=33554432": 0.7},
        Grid(),
        "training",
    )
    best = {
        "NCCL_PROTO": "Simple",
        "NCCL_MIN_NCHANNELS": "16",
        "NCCL_BUFFSIZE": "33554432",
    }
    assert judge("training", rows, Grid()).environment == best
    assert len([one for one in rows if one.environment == best]) == 2
    assert len(rows) < 20


def test_without_a_gain_the_sweep_is_short_and_nothing_is_set() -> None:
    rows = to_the_end({}, Grid())
    assert winner(rows, Grid()) == {}
    assert len(rows) == 2 + 2 + 2 + 2 + 4 + 2


def test_a_buffer_that_a_protocol_does_not_use_is_not_tried() -> None:
    rows = to_the_end({"NCCL_PROTO=LL": 0.5}, Grid())
    assert winner(rows, Grid()) == LL
    assert not any("NCCL_BUFFSIZE" in one.environment for one in rows)


def test_algorithms_are_of_all_reduce_and_only_extraction_has_them() -> None:
    tried = [one.environment for one in to_the_end({}, Grid())]
    assert {"NCCL_ALGO": "allreduce:Tree"} in tried
    training = to_the_end({}, Grid(), "training")
    assert not any("NCCL_ALGO" in one.environment for one in training)


def test_ll128_is_only_tried_when_asked_for() -> None:
    def tried(grid: Grid) -> bool:
        rows = to_the_end({}, grid)
        return any(one.environment.get("NCCL_PROTO") == "LL128" for one in rows)

    assert not tried(Grid())
    assert tried(replace(Grid(), protocols=("Simple", "LL", "LL128")))


@pytest.mark.parametrize(
    ("first", "second", "wins"),
    [
        (0.90, 0.90, True),
        (0.90, 0.995, False),  # the second launch does not bear it out
        (0.995, 0.995, False),  # within the spread
        (1.2, 1.2, False),
    ],
)
def test_a_winner_beats_the_default_by_more_than_the_spread(
    first: float, second: float, wins: bool
) -> None:
    assert winner([*DEFAULTS, *twice(LL, first, second)]) == (LL if wins else {})


def test_the_spread_is_what_launches_of_the_default_differ_by() -> None:
    apart = twice({}, 1.0, 1.2)
    assert winner([*apart, *twice(LL, 0.90, 0.90)]) == {}
    assert winner([*apart, *twice(LL, 0.70, 0.70)]) == LL


def test_the_spread_within_a_launch_counts_too() -> None:
    noisy = [replace(one, cases=(replace(one.cases[0], spread=0.3),)) for one in DEFAULTS]
    assert winner([*noisy, *twice(LL, 0.8, 0.8)]) == {}
    assert winner([*noisy, *twice(LL, 0.6, 0.6)]) == LL


def test_one_launch_is_not_enough_to_win() -> None:
    rows = [*DEFAULTS, row(LL, 0.5)]
    assert winner(rows) == {}
    assert pending("extraction", rows, ONE_PROTOCOL) == [Planned(LL, 1)]


def test_when_time_is_nearly_over_only_second_launches_are_left() -> None:
    assert confirmation("extraction", [row({})], Grid()) == [Planned({}, 1)]
    assert confirmation("extraction", [*DEFAULTS, row(LL, 0.5)], Grid()) == [Planned(LL, 1)]
    assert confirmation("extraction", [*DEFAULTS, row(LL, 1.5)], Grid()) == []


@pytest.mark.parametrize("status", ["hung", "wrong", "failed"])
@pytest.mark.parametrize("launch", [0, 1])
def test_what_went_wrong_once_cannot_win(status: str, launch: int) -> None:
    rows = [*DEFAULTS, *twice(LL, 0.5, 0.5)]
    rows[2 + launch] = replace(rows[2 + launch], status=status)  # type: ignore[arg-type]
    assert winner(rows) == {}
    assert pending("extraction", rows, ONE_PROTOCOL) == []


def test_where_the_default_does_not_work_peers_are_tried_first_and_built_upon() -> None:
    rows = [row({}, status="hung")]
    assert pending("extraction", rows, Grid())[-1] == Planned(LOC)
    rows += [row({"NCCL_P2P_LEVEL": "SYS"}, status="hung"), row(LOC, 3.0)]
    following = pending("extraction", rows, Grid())
    assert following[0] == Planned({**LOC, "NCCL_PROTO": "Simple"})
    assert all(one.environment["NCCL_P2P_LEVEL"] == "LOC" for one in following)


def test_what_works_wins_over_a_default_that_does_not() -> None:
    grid = replace(ONE_PROTOCOL, peer_levels=("LOC",), protocols=())
    rows = [row({}, status="wrong"), *twice(LOC, 3.0, 3.0)]
    verdict = judge("extraction", rows, grid)
    assert (verdict.environment, verdict.gain, verdict.why) == (LOC, None, "the default: wrong")


def test_where_nothing_works_nothing_wins_and_no_more_is_tried() -> None:
    rows = [row({}, status="hung")]
    rows += [row({"NCCL_P2P_LEVEL": level}, status="hung") for level in ("SYS", "LOC")]
    assert pending("extraction", rows, Grid()) == []
    assert winner(rows, Grid()) is None


def test_uses_are_judged_apart() -> None:
    rows = [*DEFAULTS, *twice(LL, 0.5, 0.5)]
    rows += [replace(one, use="training") for one in DEFAULTS]
    assert judge("training", rows, ONE_PROTOCOL).environment == {}
