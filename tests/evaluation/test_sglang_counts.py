import dataclasses
from typing import Any

import pytest

from pipeline.evaluation.acceptance import Acceptance
from pipeline.evaluation.errors import EvaluationError
from pipeline.evaluation.sglang_counts import (
    Agreement,
    ServerCounts,
    ServerOutcome,
    read_counts,
    server_outcome,
    summarise_server,
)

# `meta_info` of SGLang 0.5.23 for SmolLM2's held-out prompts with the drafter of the smollm2
# profile, 3 drafts, float32: one answer cut at 64 tokens, one that ended by itself inside a pass.
CUT: dict[str, Any] = {
    "prompt_tokens": 46,
    "completion_tokens": 64,
    "spec_accept_rate": 0.39080459770114945,
    "spec_accept_length": 2.206896551724138,
    "spec_num_correct_drafts": 34,
    "spec_num_proposed_drafts": 87,
    "spec_verify_ct": 29,
    "spec_correct_drafts_histogram": [13, 5, 4, 7],
}
ENDED: dict[str, Any] = {
    "completion_tokens": 63,
    "spec_verify_ct": 24,
    "spec_correct_drafts_histogram": [6, 5, 5, 8],
}


def test_the_prefills_token_does_not_count() -> None:
    counts = read_counts(CUT, draft_tokens=3)
    assert counts == ServerCounts(tokens=63, passes=29, accepted=(13, 5, 4, 7))
    # 13 + 2 * 5 + 3 * 4 + 4 * 7 = 63: every token but the first came out of a pass.


def test_drafts_behind_the_end_of_an_answer_are_no_tokens() -> None:
    counts = read_counts(ENDED, draft_tokens=3)
    assert (counts.tokens, counts.passes) == (62, 24)  # 6 + 10 + 15 + 32 = 63, one too many


def test_an_answer_of_one_token_has_no_pass() -> None:
    assert read_counts({"completion_tokens": 1}, draft_tokens=3) == ServerCounts(0, 0, ())


@pytest.mark.parametrize(
    "change",
    [
        {"spec_verify_ct": 0},
        {"spec_verify_ct": None, "spec_correct_drafts_histogram": None},
        {"spec_verify_ct": 30},
        {"spec_correct_drafts_histogram": [29]},
        {"spec_correct_drafts_histogram": [13, 5, 0, 11]},
        {"spec_correct_drafts_histogram": [13, 5, 5, 5, 1]},
    ],
)
def test_counters_that_contradict_each_other_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(EvaluationError, match="counters for an answer of 64 tokens"):
        read_counts(CUT | change, draft_tokens=3)


def test_a_server_that_did_not_draft_is_refused() -> None:
    with pytest.raises(EvaluationError):
        read_counts({"completion_tokens": 9, "prompt_tokens": 3}, draft_tokens=3)


def test_more_drafts_than_were_asked_for_are_refused() -> None:
    with pytest.raises(EvaluationError):
        read_counts(CUT, draft_tokens=2)


def outcomes() -> list[ServerOutcome]:
    same = server_outcome(
        "a", 3, plain_ids=[5] * 64, drafted_ids=[5] * 64, counts=read_counts(CUT, draft_tokens=3)
    )
    other = server_outcome(
        "b",
        4,
        plain_ids=[5] * 63,
        drafted_ids=[5] * 60 + [6, 5, 5],
        counts=read_counts(ENDED, draft_tokens=3),
    )
    return [same, other]


def summary() -> Acceptance:
    return summarise_server(outcomes(), draft_tokens=3, plain_seconds=8.0, drafted_seconds=4.0)


def test_acceptance_length_is_tokens_over_passes_of_all_prompts_together() -> None:
    result = summary()
    assert (result.tokens, result.passes) == (63 + 62, 29 + 24)
    assert result.acceptance_length == 125 / 53
    # Not the server's own: the mean of 64 / 29 and 63 / 24 is 2.42.
    assert result.acceptance_length == pytest.approx(2.358, abs=1e-3)


def test_rates_by_position_come_from_the_histogram() -> None:
    result = summary()
    assert result.tokens_per_pass == (19, 10, 9, 15)
    first, second, third = result.positions
    assert (first.reached, first.accepted) == (53, 34)
    assert (second.reached, second.accepted) == (34, 24)
    assert (third.reached, third.accepted) == (24, 15)


def test_a_different_answer_is_counted_and_shown() -> None:
    result = summary()
    assert (result.prompts, result.identical) == (2, 1)
    assert result.first_difference is not None
    found = dataclasses.asdict(result.first_difference)
    assert found == {
        "prompt": "b", "position": 60, "plain_token": 5, "drafted_token": 6,
        "plain_gap": None, "drafted_gap": None,
    }  # fmt: skip


def test_an_answer_that_ends_earlier_is_different() -> None:
    counts = ServerCounts(1, 1, (1,))
    found = server_outcome("c", 1, plain_ids=[5, 6], drafted_ids=[5], counts=counts)
    assert found.difference is not None
    assert (found.difference.position, found.difference.drafted_token) == (1, None)


def test_outcomes_and_the_summary_survive_json() -> None:
    for one in outcomes():
        assert ServerOutcome.from_json(one.to_json()) == one
    assert Acceptance.from_json(summary().to_json()) == summary()


def test_nothing_but_prefills_is_nothing_to_measure() -> None:
    one = server_outcome("a", 3, plain_ids=[5], drafted_ids=[5], counts=ServerCounts(0, 0, ()))
    with pytest.raises(EvaluationError, match="not one decode pass"):
        summarise_server([one], draft_tokens=3, plain_seconds=1.0, drafted_seconds=1.0)


@pytest.mark.parametrize(
    ("server", "holds"), [(2.0, True), (2.039, True), (1.961, True), (2.041, False), (1.959, False)]
)
def test_two_per_cent_of_the_loops_is_the_bound(server: float, holds: bool) -> None:
    both = Agreement(
        server=server, loop=2.0, server_passes=1, loop_passes=1, prompts=1, same_answers=1
    )
    assert both.holds is holds
    assert both.to_json()["relative"] == pytest.approx(abs(server - 2.0) / 2)
