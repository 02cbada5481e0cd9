import pytest
import torch
from torch import Tensor

from pipeline.draft.model import Drafter
from pipeline.draft.ttt import Frozen, Pack, pack_loss
from pipeline.draft.weights import Weights
from pipeline.evaluation.errors import WrongDrafter
from pipeline.evaluation.serving import ServingDrafter
from tests.evaluation.make import D, H, V, drafter_config, random_drafter, vocabulary_of

N, STEPS = 14, 4
VOCABULARY = vocabulary_of([i * 2 for i in range(D)])


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


EMBEDDING, TAPS = numbers(V, H, seed=5), numbers(N, 3 * H, seed=6)
IDS = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(7))


def serve(drafter: Drafter) -> ServingDrafter:
    serving = ServingDrafter(drafter, VOCABULARY, embedding=EMBEDDING)
    serving.start(capacity=N + STEPS)
    return serving


def served_logits(drafter: Drafter, row: int, *, steps: int) -> Tensor:
    """[steps, D] of a chain at `row` that is fed the true tokens, as training feeds them."""
    serving = serve(drafter)
    serving.extend(IDS[1 : row + 2].tolist(), TAPS[: row + 1])
    chain = [serving.first()]
    chain += [serving.follow(int(IDS[row + 1 + k])) for k in range(1, steps)]
    return torch.stack(chain)


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("label", [2, 5, 9, N - 1])
def test_served_chain_has_the_loss_that_training_gives_it(label: int, norm_output: bool) -> None:
    """With one supervised label, step k of training asks exactly row label - 2 - k (B13, B15)."""
    drafter = random_drafter(drafter_config(norm_output=norm_output), dtype=torch.float64)
    final, head = numbers(N, H, seed=8), numbers(D, H, seed=9)
    supervised = torch.zeros(N, dtype=torch.bool)
    supervised[label] = True
    trained = pack_loss(
        Weights.of(drafter),
        Pack.of(
            ids=IDS,
            taps=TAPS,
            final=final,
            supervised=supervised,
            document=torch.zeros(N, dtype=torch.int64),
            steps=STEPS,
            decay=1.0,
        ),
        config=drafter.config,
        frozen=Frozen.of(EMBEDDING, head, VOCABULARY),
    ).metrics
    for k in range(STEPS):
        row = label - 2 - k
        if row < 0:
            assert trained.count[k] == 0
            continue
        teacher = torch.softmax(head @ final[row + 1 + k], -1)
        served = served_logits(drafter, row, steps=k + 1)[k]
        loss = -(teacher * torch.log_softmax(served, -1)).sum()
        assert trained.count[k] == 1
        assert float(loss.detach()) == pytest.approx(float(trained.loss[k]), rel=1e-9)


def test_rows_added_in_pieces_between_chains_equal_rows_added_at_once() -> None:
    drafter = random_drafter(drafter_config(), dtype=torch.float64)
    pieces = serve(drafter)
    for first, end in ((0, 5), (5, 6), (6, 9)):
        pieces.extend(IDS[first + 1 : end + 1].tolist(), TAPS[first:end])
        pieces.propose(STEPS)  # its guesses must leave nothing behind
    whole = served_logits(drafter, 8, steps=1)[0]
    torch.testing.assert_close(pieces.first(), whole, rtol=1e-12, atol=1e-12)


def test_a_chain_can_be_drawn_twice() -> None:
    serving = serve(random_drafter(drafter_config(), dtype=torch.float64))
    serving.extend(IDS[1:6].tolist(), TAPS[:5])
    first = serving.propose(STEPS)
    serving.extend([int(IDS[6])], TAPS[5:6])
    serving.start(capacity=N + STEPS)
    serving.extend(IDS[1:6].tolist(), TAPS[:5])
    assert serving.propose(STEPS) == first


def test_drafts_are_target_ids() -> None:
    serving = serve(random_drafter(drafter_config(), dtype=torch.float64))
    serving.extend(IDS[1:6].tolist(), TAPS[:5])
    best = int(serving.first().argmax())
    assert serving.propose(1) == [2 * best]
    assert serving.propose(0) == []


@pytest.mark.parametrize(
    "embedding", [EMBEDDING[:-1], EMBEDDING[:, :-1]], ids=["fewer tokens", "narrower"]
)
def test_an_embedding_of_another_target_is_refused(embedding: Tensor) -> None:
    with pytest.raises(WrongDrafter, match="embedding"):
        ServingDrafter(
            random_drafter(drafter_config(), dtype=torch.float64), VOCABULARY, embedding=embedding
        )


def test_a_vocabulary_of_another_size_is_refused() -> None:
    drafter = random_drafter(drafter_config(), dtype=torch.float64)
    with pytest.raises(WrongDrafter, match=f"draft vocabulary {D - 1} of {V}"):
        ServingDrafter(drafter, vocabulary_of(list(range(D - 1))), embedding=EMBEDDING)
