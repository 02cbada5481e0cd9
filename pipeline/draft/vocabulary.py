"""The draft vocabulary: which target tokens the drafter can propose, and the two maps.

d2t holds OFFSETS: target id = draft id + d2t[draft id]. Servers add it to the drafter's argmax
(SGLang `models/llama_eagle3.py`, vLLM `models/llama_eagle3.py`).
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from pipeline.draft.errors import VocabularyError
from pipeline.slate.files import read_through, write_atomic


@dataclasses.dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """D draft tokens out of V target tokens, in rising order of target id.

    d2t int64 [D]: offsets. t2d bool [V]: true for target tokens that have a draft id.
    Both on the CPU, checked against each other at construction. Errors: VocabularyError.
    """

    d2t: Tensor
    t2d: Tensor

    def __post_init__(self) -> None:
        d2t, t2d = self.d2t, self.t2d
        if d2t.dtype != torch.int64 or d2t.ndim != 1 or t2d.dtype != torch.bool or t2d.ndim != 1:
            raise _broken(
                f"d2t {d2t.dtype} {list(d2t.shape)}, t2d {t2d.dtype} {list(t2d.shape)}",
                "d2t int64 [D] and t2d bool [V]",
            )
        D, V = d2t.shape[0], t2d.shape[0]
        if not 1 <= D <= V:
            raise _broken(f"{D} draft tokens for {V} target tokens", f"between 1 and {V}")
        targets = self.target_ids
        if not bool((targets[1:] > targets[:-1]).all()):
            at = int((targets[1:] <= targets[:-1]).nonzero()[0, 0])
            raise _broken(
                f"target ids {targets[at : at + 2].tolist()} at draft ids {at}, {at + 1}",
                "strictly rising target ids (d2t holds offsets, not target ids)",
            )
        if int(targets[0]) < 0 or int(targets[-1]) >= V:
            raise _broken(
                f"target ids from {int(targets[0])} to {int(targets[-1])}", f"ids in [0, {V})"
            )
        if not torch.equal(t2d.nonzero().flatten(), targets):
            raise _broken("d2t and t2d name different target tokens", "the same ones")

    @property
    def size(self) -> int:
        """D, the number of draft tokens."""
        return self.d2t.shape[0]

    @property
    def target_size(self) -> int:
        """V, the number of target tokens."""
        return self.t2d.shape[0]

    @property
    def target_ids(self) -> Tensor:
        """Target id of each draft id, int64 [D], strictly rising."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def draft_ids(self) -> Tensor:
        """Draft id of each target id, int64 [V]; -1 where the target token has none."""
        table = torch.full((self.target_size,), -1, dtype=torch.int64)
        table[self.target_ids] = torch.arange(self.size)
        return table

    def tensors(self) -> dict[str, Tensor]:
        """The two tensors under their names in weights and checkpoints."""
        return {"d2t": self.d2t, "t2d": self.t2d}

    def same_as(self, other: "DraftVocabulary") -> bool:
        """Whether both map every id alike."""
        return torch.equal(self.d2t, other.d2t) and torch.equal(self.t2d, other.t2d)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], *, source: str) -> "DraftVocabulary":
        """The vocabulary held under `d2t` and `t2d`. VocabularyError names `source`."""
        missing = {"d2t", "t2d"} - set(tensors)
        if missing:
            raise _broken(f"{source} without {sorted(missing)}", "both d2t and t2d")
        try:
            return cls(tensors["d2t"].clone(), tensors["t2d"].clone())
        except VocabularyError as error:
            raise _broken(f"{source}: {error.found}", error.wanted) from error

    def save(self, path: Path) -> None:
        """Writes safetensors holding d2t and t2d; complete or not there."""
        write_atomic(path, save(self.tensors()))

    @classmethod
    def load(cls, path: Path) -> "DraftVocabulary":
        """What `save` wrote, checked again. VocabularyError, naming the file."""
        try:
            read_through(path)
            tensors = load_file(path)
        except (OSError, SafetensorError, RuntimeError) as error:  # the last: torch cannot open it
            raise _broken(f"{path}: {error}", "a readable safetensors file") from error
        if set(tensors) != {"d2t", "t2d"}:
            raise _broken(f"{path} with tensors {sorted(tensors)}", "exactly d2t and t2d")
        return cls.from_tensors(tensors, source=str(path))


def build_vocabulary(
    counts: Tensor, size: int, *, always_in: Collection[int] = ()
) -> DraftVocabulary:
    """The `size` most frequent supervised tokens, `always_in` first, ties by lower id.

    counts int64 [V]: how often each target token is supervised in the training set.
    always_in: end-of-turn and reasoning markers. Fewer tokens seen than `size`: filled with the
    lowest unused ids. Errors: VocabularyError (size outside 1..V, more always_in than size, an id
    outside the vocabulary).
    """
    V = counts.shape[0]
    if not 1 <= size <= V:
        raise VocabularyError(
            f"draft vocabulary of {size} tokens",
            wanted=f"between 1 and the target's {V}",
            next_step="set draft.vocabulary_size in that range",
        )
    wanted = torch.tensor(sorted(set(always_in)), dtype=torch.int64)
    if wanted.numel() and (int(wanted[0]) < 0 or int(wanted[-1]) >= V):
        raise _broken(f"always-in token ids {wanted.tolist()}", f"ids in [0, {V})")
    if wanted.numel() > size:
        raise VocabularyError(
            f"{wanted.numel()} tokens that must be in, draft vocabulary of {size}",
            wanted="room for all of them",
            next_step="raise draft.vocabulary_size",
        )
    ranked = counts.to(torch.int64, copy=True).clamp_(min=0)
    ranked[wanted] = torch.iinfo(torch.int64).max
    # Stable and descending: equal counts keep rising id order, and unseen tokens (count 0) follow
    # in id order, so the fill with the lowest unused ids is the tail of the same order.
    order = torch.sort(ranked, descending=True, stable=True).indices
    targets = order[:size].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[targets] = True
    return DraftVocabulary(targets - torch.arange(size), t2d)


def _broken(found: str, wanted: str) -> VocabularyError:
    return VocabularyError(
        found, wanted=wanted, next_step="build the vocabulary again: make prepare"
    )
