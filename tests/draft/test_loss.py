import pytest
import torch

from pipeline.draft.loss import chunks
from tests.draft.make import make_config, make_rows


@pytest.mark.parametrize("most", [1, 3, 7, 1000])
def test_chunks_hold_each_teacher_once_with_all_that_it_judges(most):
    rows, *_ = make_rows(make_config(), [9, 12], [j % 3 != 1 for j in range(21)])
    plan = rows.pack(steps=3).plan
    parts = list(chunks(plan, most=most))
    teachers = [t for part, _ in parts for t in range(part.start, part.stop)]
    asked = [a for _, part in parts for a in range(part.start, part.stop)]
    assert teachers == list(range(len(plan.teachers)))
    assert asked == list(range(len(plan.asked)))
    for teacher, part in parts:
        judges = plan.judge[part]
        assert torch.equal(judges, judges.clamp(teacher.start, teacher.stop - 1))
        assert len(judges) <= max(most, 3)
