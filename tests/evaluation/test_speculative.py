from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.acceptance import VerifyPass, summarise
from pipeline.evaluation.serving import ServingDrafter
from pipeline.evaluation.speculative import decode_twice, drafted_decode, judge, plain_decode
from tests.evaluation.make import (
    D,
    counting_target,
    drafter_config,
    random_drafter,
    tiny_target,
    two_ahead_drafter,
    vocabulary_of,
)

PROMPT = [3, 17, 5, 40, 11, 2]


def serving_for(target: Any, *, dtype: torch.dtype, seed: int = 0) -> ServingDrafter:
    return ServingDrafter(
        random_drafter(drafter_config(), seed=seed, dtype=dtype),
        vocabulary_of([2 * i for i in range(D)]),
        embedding=target.get_input_embeddings().weight.detach(),
    )


@pytest.mark.parametrize(
    ("drafts", "choices", "one", "new"),
    [
        ([], [7], VerifyPass(0, 0, 1), [7]),
        ([4, 5], [4, 5, 6], VerifyPass(2, 2, 3), [4, 5, 6]),
        ([4, 5], [4, 9, 6], VerifyPass(2, 1, 2), [4, 9]),
        ([4, 5], [8, 5, 6], VerifyPass(2, 0, 1), [8]),  # a later match does not count
        ([4, 0, 5], [4, 0, 5, 6], VerifyPass(2, 2, 2), [4, 0]),  # end of turn accepted
        ([4, 5], [0, 5, 6], VerifyPass(1, 0, 1), [0]),  # end of turn instead of the first draft
        ([4, 5], [4, 5, 0], VerifyPass(2, 2, 3), [4, 5, 0]),  # end of turn as the bonus
    ],
)
def test_a_pass_accepts_the_matching_prefix_and_stops_at_the_end_of_turn(
    drafts: list[int], choices: list[int], one: VerifyPass, new: list[int]
) -> None:
    assert judge(drafts, choices, end_ids={0}) == (one, new)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.integers(0, 3))
def test_a_pass_emits_what_the_target_chose(pairs: list[tuple[int, int]], last: int) -> None:
    drafts, choices = [draft for draft, _ in pairs], [choice for _, choice in pairs] + [last]
    one, new = judge(drafts, choices, end_ids={0})
    assert new == choices[: one.emitted]
    assert 1 <= one.emitted <= one.accepted + 1 <= one.judged + 1 <= len(choices)


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drafted_answer_equals_the_plain_one(seed: int, draft_tokens: int) -> None:
    target = tiny_target(seed=seed, dtype=torch.float32)
    outcome = decode_twice(
        "p",
        target,
        serving_for(target, dtype=torch.float32, seed=seed),
        prompt_ids=PROMPT,
        draft_tokens=draft_tokens,
        max_new_tokens=40,
        end_ids=frozenset(),
    )
    assert outcome.difference is None
    assert outcome.drafted_ids == outcome.plain_ids
    assert len(outcome.drafted_ids) == 40
    assert sum(one.emitted for one in outcome.passes) == 39  # the prefill gave the other


def test_plain_answer_is_the_one_transformers_generates() -> None:
    target = tiny_target(dtype=torch.float64)
    answer = target.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    plain = plain_decode(target, PROMPT, max_new_tokens=20, end_ids=())
    assert list(plain.ids) == answer[0, len(PROMPT) :].tolist()


def test_a_drafter_that_knows_the_token_after_next_is_accepted_once_a_pass() -> None:
    drafted = drafted_decode(
        counting_target(16),
        two_ahead_drafter(16, list(range(16))),
        prompt_ids=[3, 4, 5],
        draft_tokens=3,
        max_new_tokens=21,
        end_ids=(),
    )
    assert drafted.ids == tuple(i % 16 for i in range(6, 27))
    assert drafted.passes == (VerifyPass(3, 1, 2),) * 9 + (VerifyPass(1, 1, 2),)


def test_tokens_outside_the_draft_vocabulary_are_never_accepted() -> None:
    """Only odd tokens can be drafted: after an even newest token a draft is right, else wrong."""
    drafted = drafted_decode(
        counting_target(16),
        two_ahead_drafter(16, list(range(1, 16, 2))),
        prompt_ids=[3, 4],
        draft_tokens=1,
        max_new_tokens=8,
        end_ids=(),
    )
    assert drafted.ids == (5, 6, 7, 8, 9, 10, 11, 12)
    # 5 is odd: nothing right, one token (6); then pairs (7, 8), (9, 10), (11, 12).
    assert [one.emitted for one in drafted.passes] == [1, 2, 2, 2]


def test_an_answer_stops_at_its_end_of_turn_in_both_loops() -> None:
    outcome = decode_twice(
        "p",
        counting_target(16),
        two_ahead_drafter(16, list(range(16))),
        prompt_ids=[3, 4, 5],
        draft_tokens=3,
        max_new_tokens=30,
        end_ids=frozenset({9}),
    )
    assert outcome.plain_ids == outcome.drafted_ids == (6, 7, 8, 9)
    assert outcome.plain_passes == 3
    assert outcome.passes == (VerifyPass(3, 1, 2), VerifyPass(1, 1, 1))
    assert summarise([outcome], draft_tokens=3).acceptance_length == 1.5


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4])
def test_the_length_limit_is_kept(max_new_tokens: int) -> None:
    drafted = drafted_decode(
        counting_target(16),
        two_ahead_drafter(16, list(range(16))),
        prompt_ids=[1],
        draft_tokens=3,
        max_new_tokens=max_new_tokens,
        end_ids=(),
    )
    assert drafted.ids == (2, 3, 4, 5)[:max_new_tokens]


def test_a_first_token_that_ends_the_turn_needs_no_pass() -> None:
    target, drafter = counting_target(16), two_ahead_drafter(16, list(range(16)))
    plain = plain_decode(target, [7], max_new_tokens=9, end_ids={8})
    drafted = drafted_decode(
        target, drafter, prompt_ids=[7], draft_tokens=2, max_new_tokens=9, end_ids={8}
    )
    assert plain.ids == drafted.ids == (8,)
    assert plain.passes == drafted.passes == ()


def test_gaps_are_the_lead_of_the_best_logit() -> None:
    target = tiny_target(dtype=torch.float64)
    plain = plain_decode(target, PROMPT, max_new_tokens=1, end_ids=())
    top = target(torch.tensor([PROMPT])).logits[0, -1].topk(2)
    assert plain.ids == (int(top.indices[0]),)
    assert plain.gaps[0] == pytest.approx(float(top.values[0] - top.values[1]))
