import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.acceptance import (
    Acceptance,
    Difference,
    Outcome,
    PositionRate,
    VerifyPass,
    find_difference,
    rate_positions,
    summarise,
)
from pipeline.evaluation.errors import EvaluationError

PASSES = (
    VerifyPass(judged=2, accepted=2, emitted=3),
    VerifyPass(judged=2, accepted=1, emitted=2),
    VerifyPass(judged=2, accepted=0, emitted=1),
    VerifyPass(judged=1, accepted=1, emitted=1),  # the accepted draft was the end of turn
)
OUTCOME = Outcome(
    prompt="p-1",
    prompt_tokens=5,
    plain_ids=(9, 1, 2, 3, 4, 5, 6, 7),
    drafted_ids=(9, 1, 2, 3, 4, 5, 6, 7),
    passes=PASSES,
    plain_passes=7,
    plain_seconds=0.7,
    drafted_seconds=0.5,
    plain_prefill_seconds=0.1,
    drafted_prefill_seconds=0.2,
    difference=None,
)
DIFFERENCE = Difference("p-1", 3, 7, 8, 1e-6, 2e-6)


def test_rates_of_each_position_by_hand() -> None:
    first, second = rate_positions(PASSES, 2)
    assert first == PositionRate(position=0, judged=4, reached=4, accepted=3)
    assert second == PositionRate(position=1, judged=3, reached=2, accepted=1)
    assert (first.conditional, first.unconditional) == (0.75, 0.75)
    assert (second.conditional, second.unconditional) == (0.5, 1 / 3)


def test_a_position_that_was_never_judged_has_no_rate() -> None:
    rate = rate_positions([VerifyPass(0, 0, 1)], 1)[0]
    assert rate.conditional is None
    assert rate.unconditional is None


def test_acceptance_length_leaves_the_prefill_token_out() -> None:
    acceptance = summarise([OUTCOME], draft_tokens=2)
    assert (acceptance.tokens, acceptance.passes, acceptance.plain_passes) == (7, 4, 7)
    assert acceptance.acceptance_length == 1.75
    assert acceptance.tokens_per_pass == (2, 1, 1)


def test_times_are_added_over_prompts() -> None:
    acceptance = summarise([OUTCOME, replace(OUTCOME, plain_seconds=1.3)], draft_tokens=2)
    assert acceptance.speed_up == pytest.approx(2.0)
    assert acceptance.total_speed_up == pytest.approx(2.2 / 1.4)


def test_identical_prompts_are_counted_and_the_first_difference_kept() -> None:
    other = replace(OUTCOME, difference=DIFFERENCE)
    last = replace(OUTCOME, difference=replace(DIFFERENCE, position=1))
    acceptance = summarise([OUTCOME, other, last], draft_tokens=2)
    assert (acceptance.prompts, acceptance.identical) == (3, 1)
    assert acceptance.first_difference == DIFFERENCE


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="1 prompts and not one decode pass"):
        summarise([replace(OUTCOME, passes=())], draft_tokens=2)


@pytest.mark.parametrize("difference", [None, DIFFERENCE])
def test_outcome_and_acceptance_survive_json(difference: Difference | None) -> None:
    outcome = replace(OUTCOME, difference=difference)
    acceptance = summarise([outcome], draft_tokens=2)
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    assert Acceptance.from_json(json.loads(json.dumps(acceptance.to_json()))) == acceptance


def test_equal_answers_have_no_difference() -> None:
    assert (
        find_difference("p", [1, 2], drafted=[1, 2], plain_gaps=[0, 0], drafted_gaps=[0, 0]) is None
    )


def test_first_difference_comes_with_both_gaps() -> None:
    found = find_difference(
        "p", [1, 2, 3], drafted=[1, 5, 6], plain_gaps=[1.0, 0.25, 1.0], drafted_gaps=[1.0, 0.5, 1.0]
    )
    assert found == Difference("p", 1, 2, 5, 0.25, 0.5)


def test_an_answer_that_ends_early_differs_there() -> None:
    found = find_difference("p", [1, 2], drafted=[1], plain_gaps=[1.0, 0.25], drafted_gaps=[1.0])
    assert found == Difference("p", 1, 2, None, 0.25, None)


@given(st.lists(st.integers(0, 4), min_size=1))
def test_acceptance_length_is_one_and_the_sum_of_unconditional_rates(accepted: list[int]) -> None:
    passes = tuple(VerifyPass(judged=4, accepted=n, emitted=n + 1) for n in accepted)
    acceptance = summarise([replace(OUTCOME, passes=passes)], draft_tokens=4)
    rates = [rate.unconditional or 0.0 for rate in acceptance.positions]
    assert acceptance.acceptance_length == pytest.approx(1 + sum(rates))
