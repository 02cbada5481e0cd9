"""B13: row t at TTT step k learns exactly when its label, token t + 2 + k, lies in an answer."""

import pytest
import torch

from pipeline.draft.forward import forward
from pipeline.draft.loss import head_loss
from pipeline.draft.ttt import Frozen
from pipeline.draft.weights import Weights
from tests.draft.make import make_config, make_drafter, make_rows, run

STEPS = 3
# Answer positions of ten tokens, and the rows that learn at steps 0, 1 and 2: labels less 2, 3, 4.
LAYOUTS = {
    "one answer": ([4, 5, 6, 7], [[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]),
    "two answers": ([3, 4, 8], [[1, 2, 6], [0, 1, 5], [0, 4]]),
    "touching the end": ([7, 8, 9], [[5, 6, 7], [4, 5, 6], [3, 4, 5]]),
    "one token": ([5], [[3], [2], [1]]),
    "touching the front": ([0, 1, 2], [[0], [], []]),
    "the last token": ([9], [[7], [6], [5]]),
    "all": (
        list(range(10)),
        [list(range(8)), list(range(7)), list(range(6))],
    ),
}
# What lies around the ten tokens in the same pack, all of it supervised: samples before and after.
PACKS = {"alone": (0, 0), "behind another": (4, 0), "before another": (0, 5), "between": (3, 6)}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def packed(answer: list[int], before: int, after: int):
    lengths = [n for n in (before, 10, after) if n]
    marks = [True] * before + [at in answer for at in range(10)] + [True] * after
    config = make_config(draft_vocabulary_size=11)
    return config, *make_rows(config, lengths, marks)


def learning_rows(config, rows, frozen) -> list[list[int]]:
    """Rows of the pack whose logits get a gradient, by step: read off the slopes of the loss."""
    pack, weights = rows.pack(steps=STEPS), Weights.of(make_drafter(config))
    plan = pack.plan
    states = forward(
        weights, config, plan, ids=pack.ids, taps=pack.taps, embedding=frozen.embedding
    )
    _, slopes = head_loss(
        weights, states.output, plan, eps=config.rms_norm_eps, final=pack.final,
        teacher_head=frozen.teacher_head, labels=frozen.draft_ids[pack.ids[plan.label]], kind="kl",
        gradients=Weights.zeros(config, dtype=torch.float64), scale=1.0, fresh=True,
    )  # fmt: skip
    of_place = plan.keys[plan.at_keys].tolist()  # pack row of every place in the stack
    for place in plan.previous.tolist():
        of_place.append(of_place[place])
    return [
        [of_place[at] for at in range(first, last) if slopes[at].abs().max() > 0]
        for first, last in plan.steps
    ]


@pytest.mark.parametrize("around", PACKS)
def test_rows_with_a_gradient_are_those_whose_label_lies_in_an_answer(layout, around):
    answer, wanted = layout
    before, after = PACKS[around]
    config, rows, *frozen = packed(answer, before, after)
    found = learning_rows(config, rows, Frozen.of(*frozen))
    found += [[]] * (STEPS - len(found))
    inside = [[row - before for row in step if before <= row < before + 10] for step in found]
    assert inside == wanted
    # The neighbours, supervised throughout, learn in all rows whose label is still their own.
    for k, step in enumerate(found):
        others = [row for row in step if not before <= row < before + 10]
        assert others == [
            start + row
            for start, size in ((0, before), (before + 10, after))
            for row in range(size - 2 - k)
        ]


def test_each_step_is_judged_by_the_teacher_one_token_before_the_label(layout):
    """Moving the final state of row r moves the loss of step k only where row r + 1 is a label."""
    answer, wanted = layout
    config, rows, *frozen = packed(answer, 0, 0)
    model, frozen = make_drafter(config), Frozen.of(*frozen)

    def losses() -> list[float]:
        return run(model, rows.pack(steps=STEPS), frozen, learn=False)[0].metrics.loss.tolist()

    base, moved = losses(), [[], [], []]
    for row in range(10):
        rows.final[row] += 1
        for k, (now, then) in enumerate(zip(losses(), base, strict=True)):
            if abs(now - then) > 1e-9:
                moved[k].append(row)
        rows.final[row] -= 1
    assert moved == [[row + 1 + k for row in step] for k, step in enumerate(wanted)]


def test_labels_and_rows_of_every_step_are_counted(layout):
    answer, wanted = layout
    config, rows, *frozen = packed(answer, 0, 0)
    result, _ = run(make_drafter(config), rows.pack(steps=STEPS), Frozen.of(*frozen))
    assert result.metrics.count.tolist() == [len(step) for step in wanted]
