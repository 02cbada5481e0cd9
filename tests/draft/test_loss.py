import pytest
import torch

from pipeline.draft.loss import LossInputs, head_loss, plan_chunks


def test_chunks_hold_each_asked_row_once_with_its_teacher():
    judges = [torch.tensor([0, 1, 3, 4]), torch.tensor([1, 2, 4])]
    assert plan_chunks(judges, 5, rows=2) == (
        (0, 2, ((0, 2), (4, 5))),
        (2, 4, ((2, 3), (5, 6))),
        (4, 5, ((3, 4), (6, 7))),
    )


def make(kind: str, *, rows: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(3)
    noise = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    judges = [torch.tensor([0, 1, 3, 4]), torch.tensor([1, 2, 4])]
    hidden, head = noise(7, 6).to(dtype).requires_grad_(), noise(9, 6).to(dtype).requires_grad_()
    inputs = LossInputs(
        teacher=noise(5, 6).to(dtype),
        teacher_head=noise(9, 6).to(dtype),
        chunks=plan_chunks(judges, 5, rows=rows),
        judge=torch.cat(judges),
        label=torch.tensor([0, -1, 2, 3, 4, 5, 6]),
        weights=(1.0, 0.5),
        kind=kind,
    )
    return hidden, head, inputs


def plain(hidden, head, inputs):
    weights = torch.tensor([1.0] * 4 + [0.5] * 3, dtype=torch.float64)
    p = (inputs.teacher @ inputs.teacher_head.T).double().softmax(-1)[inputs.judge]
    log_q = (hidden @ head.T).double().log_softmax(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    loss = -(p * log_q).sum(-1) if inputs.kind == "kl" else 1 - overlap
    correct = log_q.argmax(-1) == inputs.label
    table = torch.stack([loss.detach(), correct.double(), overlap.detach()])
    return loss @ weights, torch.stack([table[:, :4].sum(1), table[:, 4:].sum(1)], 1)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_chunked_loss_and_gradients_equal_autograd(kind, rows):
    hidden, head, inputs = make(kind, rows=rows)
    loss, sums = head_loss(hidden, head, inputs)
    wanted, wanted_sums = plain(hidden, head, inputs)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(sums, wanted_sums, rtol=1e-12, atol=1e-14)
    got = torch.autograd.grad(loss * 3, [hidden, head])
    for one, other in zip(got, torch.autograd.grad(wanted * 3, [hidden, head]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_without_gradients_the_loss_is_the_same():
    hidden, head, inputs = make("kl", rows=2)
    with torch.no_grad():
        loss, _ = head_loss(hidden, head, inputs)
    assert not loss.requires_grad
    assert loss.item() == head_loss(hidden, head, inputs)[0].item()


def test_bf16_states_give_a_float32_loss():
    hidden, head, inputs = make("kl", rows=2, dtype=torch.bfloat16)
    loss, _ = head_loss(hidden, head, inputs)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(plain(hidden, head, inputs)[0].item(), rel=0.02)
