"""Small drafters and packs for the tests of this room."""

import dataclasses

import torch

from pipeline.draft.config import DrafterConfig
from pipeline.draft.model import Drafter
from pipeline.draft.ttt import Frozen, Pack, PackLoss, pack_loss
from pipeline.draft.vocabulary import DraftVocabulary, build_vocabulary
from pipeline.draft.weights import Weights

CONFIG = DrafterConfig(
    hidden_size=12,
    target_hidden_size=12,
    intermediate_size=20,
    heads=4,
    kv_heads=2,
    head_dim=4,
    draft_vocabulary_size=7,
    target_vocabulary_size=11,
    rope_theta=100.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    norm_output=False,
    taps=(1, 2, 3),
)


def make_config(**changes) -> DrafterConfig:
    return dataclasses.replace(CONFIG, **changes)


def make_drafter(config: DrafterConfig, *, seed: int = 0) -> Drafter:
    """Float64, weights far from their start, norms far from one."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(config.draft_vocabulary_size, config.hidden_size, generator=generator)
    model = Drafter.initialised(config, head_rows=head, seed=seed).double()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise * spread)
    return model


@dataclasses.dataclass(frozen=True)
class Rows:
    """All rows of a pack: ids [T], taps [T, 3H], final [T, H]; masks and places [T]."""

    ids: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor
    supervised: torch.Tensor
    document: torch.Tensor
    position: torch.Tensor

    def pack(self, *, steps: int, decay: float = 0.8) -> Pack:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["position"]
        return Pack.of(**fields, steps=steps, decay=decay)


def make_rows(config: DrafterConfig, lengths: list[int], supervised: list[bool], *, seed: int = 0):
    """Rows, embedding, teacher head (draft rows) and vocabulary, float64."""
    generator = torch.Generator().manual_seed(seed)
    T, H = sum(lengths), config.hidden_size

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    V = config.target_vocabulary_size
    counts = torch.randint(0, 9, (V,), generator=generator)
    vocabulary: DraftVocabulary = build_vocabulary(counts, config.draft_vocabulary_size)
    rows = Rows(
        ids=torch.randint(0, V, (T,), generator=generator),
        taps=noise(T, 3 * H),
        final=noise(T, H),
        supervised=torch.tensor(supervised, dtype=torch.bool),
        document=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        position=torch.cat([torch.arange(n) for n in lengths]),
    )
    return rows, noise(V, H), noise(V, H)[vocabulary.target_ids], vocabulary


def run(
    model: Drafter, pack: Pack, frozen: Frozen, *, kind: str = "kl", learn: bool = True
) -> tuple[PackLoss, dict[str, torch.Tensor]]:
    """The loss of a pack, and its gradient by parameter name (empty unless it learns)."""
    weights = Weights.of(model)
    wide = torch.promote_types(weights.head.dtype, torch.float32)
    device = weights.head.device
    gradients = Weights.zeros(model.config, dtype=wide, device=device) if learn else None
    result = pack_loss(
        weights, pack, config=model.config, frozen=frozen, kind=kind, gradients=gradients
    )
    return result, gradients.by_name(model.config) if gradients else {}
