"""From seconds of batches to rows, one for each use that an attempt reached."""

import pytest

from pipeline.nccl.attempt import Attempt, Status
from pipeline.nccl.rows import Row, name_of, rows_of
from tests.nccl.make import SMALL

EXTRACTION, TRAINING = (case.key for case in SMALL)
SECONDS = (4.0, 1.0, 2.0, 3.0, 100.0)


def rows(status: Status, at: str | None, seconds: dict[str, tuple[float, ...]]) -> list[Row]:
    attempt = Attempt(status, "why", at, seconds, wall_seconds=2.0)
    return rows_of(
        attempt, SMALL, uses=["extraction", "training"], environment={}, launch=0, world=2
    )


def test_a_case_has_its_median_its_slow_end_and_its_bandwidth() -> None:
    measured = rows("ok", None, {EXTRACTION: SECONDS, TRAINING: SECONDS})[0].cases[0]
    assert (measured.median_seconds, measured.p95_seconds, measured.samples) == (3.0, 100.0, 5)
    assert measured.spread == (4.0 - 2.0) / 3.0  # of the middle half
    assert measured.bus_bytes_per_second == 1024 / 3.0


def test_a_use_behind_the_one_that_failed_has_no_row() -> None:
    found = rows("hung", EXTRACTION, {})
    assert [(row.use, row.status, row.code) for row in found] == [
        ("extraction", "hung", "HOST-NCCL-HANG")
    ]


def test_a_use_before_the_one_that_failed_is_whole() -> None:
    found = rows("wrong", TRAINING, {EXTRACTION: SECONDS})
    assert [(row.use, row.status, row.code, row.detail) for row in found] == [
        ("extraction", "ok", None, ""),
        ("training", "wrong", "HOST-NCCL-SUM", "why"),
    ]


def test_what_fails_before_the_first_message_fails_for_all_uses() -> None:
    found = rows("failed", None, {})
    assert [(row.use, row.code) for row in found] == [
        ("extraction", "HOST-NCCL-FAILED"),
        ("training", "HOST-NCCL-FAILED"),
    ]


def test_twice_as_fast_counts_alike_at_every_size() -> None:
    def score(small: float, large: float) -> float:
        first, second = (
            rows("ok", None, {EXTRACTION: (s,) * 2, TRAINING: (s,) * 2})[0].cases[0]
            for s in (small, large)
        )
        return Row("extraction", {}, 0, "ok", None, "", 1.0, (first, second)).score

    assert score(1e-5, 1.0) == pytest.approx(score(2e-5, 0.5))


def test_a_row_reads_back_as_it_was_written() -> None:
    row = rows("ok", None, {EXTRACTION: SECONDS, TRAINING: SECONDS})[0]
    assert Row.from_json(row.to_json()) == row


def test_candidates_are_called_by_what_they_set() -> None:
    assert name_of({}) == "default"
    assert name_of({"NCCL_PROTO": "LL", "NCCL_MIN_NCHANNELS": "8"}) == "PROTO=LL MIN_NCHANNELS=8"
