from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.errors import ReportError
from pipeline.report.facts import Boundary, Piece, StepPoint, split_pieces
from pipeline.report.series import Curve, accuracy_curve, skip_reasons, smooth, thin


def test_counts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ReportError, match="10 records read, 7 kept, 2 skipped") as caught:
        Boundary("prepare", "records", 10, 7, {"empty": 2})
    assert caught.value.next_step == "make prepare"


def test_pieces_change_where_the_mask_changes() -> None:
    pieces = split_pieces(
        [1, 2, 3, 4], [False, True, True, False], decode=lambda ids: "".join(map(str, ids))
    )
    assert pieces == (Piece("1", False), Piece("23", True), Piece("4", False))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans())))
def test_pieces_together_are_the_whole_sample(sample: list[tuple[int, bool]]) -> None:
    ids, mask = [one[0] for one in sample], [one[1] for one in sample]
    pieces = split_pieces(ids, mask, decode=lambda some: "".join(map(str, some)))
    assert "".join(piece.text for piece in pieces) == "".join(map(str, ids))
    assert all(a.supervised != b.supervised for a, b in pairwise(pieces))


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        split_pieces([1, 2], [True], decode=str)


def test_reasons_are_sorted_by_count_within_a_stage_and_zeros_left_out() -> None:
    boundaries = [
        Boundary("prepare", "records", 9, 3, {"a": 1, "b": 5, "c": 0}),
        Boundary("x", "s", 1, 1),
    ]
    assert skip_reasons(boundaries) == (("prepare", "b", 5), ("prepare", "a", 1))


def test_thinning_keeps_both_ends() -> None:
    curve = Curve(tuple(range(10_000)), tuple(float(i) for i in range(10_000)))
    drawn = thin(curve, 100)
    assert len(drawn.x) == 100
    assert (drawn.x[0], drawn.x[-1]) == (0, 9_999)
    assert drawn.x == drawn.y


def test_smoothing_keeps_a_straight_line_straight() -> None:
    n = 300
    curve = Curve(tuple(range(n)), tuple(2.0 * i for i in range(n)))
    assert smooth(curve).y[10:-10] == pytest.approx(curve.y[10:-10])


def test_a_short_curve_is_drawn_as_it_is() -> None:
    curve = Curve((1, 2, 3), (5.0, 1.0, 4.0))
    assert smooth(curve) == curve


def test_points_without_a_ttt_step_are_left_out() -> None:
    points = [StepPoint(1, 0.1, 2.0, (0.5,)), StepPoint(2, 0.2, 1.9, (0.6, 0.4))]
    assert accuracy_curve(points, 1) == Curve((2,), (0.4,))
