"""Faults of one request among right ones: each is found, whatever its length and number say."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.adoption.dump import Dump
from pipeline.adoption.judge import in_order, take
from pipeline.adoption.torch_file import Unfit
from tests.adoption.conftest import Captured, Four, write_request

Judged = Callable[[Callable[[int], Four | None]], list[str]]


def test_every_right_request_fits_its_own_sample(captured: Captured, tmp_path: Path) -> None:
    for number, states in enumerate(captured.states):
        write_request(tmp_path, number, states)
    found = captured.judge(tmp_path)
    assert [(one.outcome, one.sample) for one in found.values()] == [
        ("fits", number) for number in range(37)
    ]


def test_the_number_is_only_a_hint(captured: Captured, tmp_path: Path) -> None:
    for number, states in enumerate(captured.states):
        write_request(tmp_path, 36 - number, states)
    found = captured.judge(tmp_path)
    assert {name: one.sample for name, one in found.items()} == {
        f"req_{36 - number}": number for number in range(37)
    }


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 2), (0, 3), (1, 3), (2, 3)])
def test_files_swapped_within_a_request_are_found(
    captured: Captured, judged: Judged, pair: tuple[int, int]
) -> None:
    def swapped(number: int) -> Four:
        states = list(captured.states[number])
        a, b = pair
        states[a], states[b] = states[b], states[a]
        return states

    assert judged(swapped) == ["swapped"] * 8


@pytest.mark.parametrize("files", [[1, 1, 2, 3], [0, 2, 2, 3], [0, 1, 0, 3]])
def test_one_file_under_two_names_is_found(
    captured: Captured, judged: Judged, files: list[int]
) -> None:
    assert judged(lambda n: [captured.states[n][f] for f in files]) == ["swapped"] * 8


@pytest.mark.parametrize("file", [0, 1, 2, 3])
def test_a_file_of_another_request_of_the_same_length_is_found(
    captured: Captured, judged: Judged, file: int
) -> None:
    def mixed(number: int) -> Four | None:
        states = list(captured.states[number])
        others = [n for n in captured.same_length(len(states[0])) if n != number]
        if not others:
            return None
        states[file] = captured.states[others[0]][file]
        return states

    assert judged(mixed) == ["mixed"] * 5


@pytest.mark.parametrize(("file", "reason"), [(0, "mixed"), (1, "mixed"), (2, "mixed")])
def test_rows_moved_by_one_in_one_file_are_found(
    captured: Captured, judged: Judged, file: int, reason: str
) -> None:
    def moved(number: int) -> Four:
        states = list(captured.states[number])
        states[file] = states[file].roll(1, 0)
        return states

    assert judged(moved) == [reason] * 8


def test_rows_that_are_as_like_their_neighbours_as_their_own_are_mixed() -> None:
    seeded = torch.Generator().manual_seed(0)
    walk = torch.randn(64, 64, generator=seeded).cumsum(0)
    noise = [share * torch.randn(64, 64, generator=seeded) for share in (0.3, 0.2, 0.1)]
    *aux, final = [*(walk + one for one in noise), walk]
    assert len(in_order([*aux, final])) == 3
    with pytest.raises(Unfit, match="mixed"):
        in_order([aux[0].roll(1, 0), *aux[1:], final])


def test_rows_moved_by_one_in_all_files_fit_nothing(captured: Captured, judged: Judged) -> None:
    found = judged(lambda n: [one.roll(1, 0) for one in captured.states[n]])
    assert set(found) <= {"no_match", "short"}


def test_rows_that_end_early_are_short(captured: Captured, judged: Judged) -> None:
    found = judged(lambda n: [one[:-3] for one in captured.states[n]])
    # The first has 5 supervised tokens, of which 2 are left.
    assert found == ["no_length", *["short"] * 7]


def test_final_states_before_the_norm_are_refused(captured: Captured, judged: Judged) -> None:
    def before(number: int) -> Four:
        *aux, final = captured.states[number]
        return [*aux, (final.float() * 1.5).bfloat16()]

    assert judged(before) == ["not_normed"] * 8


def test_states_of_another_target_match_no_sample(captured: Captured, judged: Judged) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    found = judged(lambda n: [one[:, order] for one in captured.states[n]])
    assert set(found) <= {"not_normed", "no_match"}


def test_states_of_other_texts_match_no_sample(captured: Captured, judged: Judged) -> None:
    def other(number: int) -> Four:
        return [one.flip(0) for one in captured.states[number]]

    assert set(judged(other)) == {"no_match"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_float_types_are_rounded_as_extract_rounds(
    captured: Captured, judged: Judged, tmp_path: Path, dtype: torch.dtype
) -> None:
    assert judged(lambda n: [one.to(dtype) for one in captured.states[n]]) == ["fits"] * 8
    judge, request = captured.judge_of(tmp_path / "dump"), Dump.scan(tmp_path / "dump").requests[0]
    found = take(tmp_path / "dump", request, judge.judge(request).pieces, judge.norm)
    for one, other in zip(found, captured.states[0], strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other.to(dtype).bfloat16())


def spoilt(captured: Captured, number: int, file: int, row: int, value: float) -> Four:
    states = [one.clone() for one in captured.states[number]]
    states[file][row] = value
    return states


@pytest.mark.parametrize(
    ("value", "reason"),
    [(float("nan"), "not_finite"), (float("-inf"), "not_finite"), (0.0, "zero_row")],
)
@pytest.mark.parametrize("file", [0, 3])
def test_bad_rows_are_found(
    captured: Captured, judged: Judged, file: int, value: float, reason: str
) -> None:
    found = judged(lambda n: spoilt(captured, n, file, 40, value) if n in (1, 5) else None)
    assert found == [reason] * 2


def test_another_width_or_number_of_rows_is_refused(captured: Captured, tmp_path: Path) -> None:
    states = captured.states[1]
    write_request(tmp_path, 0, [one[:, :32] for one in states])
    write_request(tmp_path, 1, [states[0], states[1][:-1], states[2], states[3]])
    write_request(tmp_path, 2, [one[:9] for one in states])
    found = captured.judge(tmp_path)
    assert found["req_0"].outcome == "wrong_width"
    assert found["req_0"].detail == "states of width [32, 32, 32, 32]; the target has 64"
    assert found["req_1"].outcome == "rows_differ"
    assert found["req_2"].outcome == "too_short"
