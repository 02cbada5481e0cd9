"""The drafted loop under any pattern of acceptance, steered by drafts that are right on purpose."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluation.passes import TargetPasses, recording
from pipeline.evaluation.serving import ServingDrafter
from pipeline.evaluation.speculative import drafted_decode, plain_decode
from tests.evaluation.make import D, V, drafter_config, random_drafter, tiny_target, vocabulary_of

PROMPT, LENGTH, K = [3, 17, 5, 40, 11, 2], 30, 3
DRAFTER = random_drafter(drafter_config(), dtype=torch.float64)
VOCABULARY = vocabulary_of([2 * i for i in range(D)])


class Steered(ServingDrafter):
    """Notes what the drafter proposes and offers `right[i]` right tokens, then wrong ones."""

    def __init__(self, target: Any, answer: tuple[int, ...], right: list[int]) -> None:
        embedding = target.get_input_embeddings().weight
        super().__init__(DRAFTER, VOCABULARY, embedding=embedding)
        self.answer, self.right = answer, right
        self.emitted = 0
        self.proposed: list[tuple[int, list[int]]] = []  # (tokens emitted before, own drafts)

    def extend(self, tokens: Any, taps: torch.Tensor) -> None:
        self.emitted += 1 if self.emitted == 0 else len(tokens)  # the first call is the prompt
        super().extend(tokens, taps)

    def propose(self, count: int) -> list[int]:
        self.proposed.append((self.emitted, super().propose(count)))
        right = self.right[(len(self.proposed) - 1) % len(self.right)]
        true = self.answer[self.emitted : self.emitted + count]
        return [token if i < right else (token + 1) % V for i, token in enumerate(true)]


def fresh_proposal(target: Any, tokens: list[int], count: int) -> list[int]:
    """What a drafter says that has only ever seen the true taps of `tokens`."""
    drafter = ServingDrafter(DRAFTER, VOCABULARY, embedding=target.get_input_embeddings().weight)
    drafter.start(capacity=len(tokens) + K)
    with recording(target, drafter.taps) as taps:
        TargetPasses(target).run(tokens[:-1], last=1)
    drafter.extend(tokens[1:], taps.latest())
    return drafter.propose(count)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(dtype=torch.float64)


@pytest.fixture(scope="module")
def answer(target: Any) -> tuple[int, ...]:
    return plain_decode(target, PROMPT, max_new_tokens=LENGTH, end_ids=()).ids


@settings(max_examples=12)
@given(right=st.lists(st.integers(0, K), min_size=1, max_size=6))
def test_any_pattern_of_acceptance_gives_the_plain_answer(
    target: Any, answer: tuple[int, ...], right: list[int]
) -> None:
    steered = Steered(target, answer, right)
    drafted = drafted_decode(
        target,
        steered,
        prompt_ids=PROMPT,
        draft_tokens=K,
        max_new_tokens=LENGTH,
        end_ids=(),
    )
    assert drafted.ids == answer
    for i, one in enumerate(drafted.passes):
        assert one.accepted == min(right[i % len(right)], one.judged)


def test_every_chain_starts_from_rows_with_the_targets_own_taps(
    target: Any, answer: tuple[int, ...]
) -> None:
    steered = Steered(target, answer, [0, 3, 1, 2])
    drafted_decode(
        target, steered, prompt_ids=PROMPT, draft_tokens=K, max_new_tokens=LENGTH, end_ids=()
    )
    assert len(steered.proposed) > 8
    for emitted, drafts in steered.proposed:
        assert drafts == fresh_proposal(target, [*PROMPT, *answer[:emitted]], len(drafts))
