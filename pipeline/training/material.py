"""What a run is made of: dataset, draft vocabulary, drafter shape, frozen target tensors.

Everything is checked against everything else here, before a byte of states is read.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.draft.config import DrafterConfig
from pipeline.draft.export import load_exported
from pipeline.draft.model import Drafter
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.slate.files import sha256_file
from pipeline.store.reader import StateDataset
from pipeline.target.facts import fingerprint
from pipeline.target.tensors import read_embedding, read_head
from pipeline.training.errors import NothingToTrain, RequestError
from pipeline.training.request import TrainRequest


@dataclass(frozen=True, eq=False)
class Material:
    """embedding [V, H] and teacher_head [D, H] are frozen, on the CPU, in the target's dtype.

    warm: the drafter to go on from, None for a fresh one. data: digests by what they are of; a
    resumed run must agree in all of them.
    """

    dataset: StateDataset
    vocabulary: DraftVocabulary
    config: DrafterConfig
    embedding: Tensor
    teacher_head: Tensor
    warm: Drafter | None
    data: dict[str, Any]

    def drafter(self, seed: int) -> Drafter:
        """The drafter that training starts from, float32, on the CPU."""
        if self.warm is not None:
            return self.warm.to(torch.float32)
        return Drafter.initialised(self.config, head_rows=self.teacher_head, seed=seed)


def load_material(request: TrainRequest) -> Material:
    """Opens and checks all parts. RequestError, or the part's own fault, when they do not fit."""
    dataset = StateDataset.open(request.dataset)
    config = DrafterConfig.from_json(request.drafter)
    warm, vocabulary = start_and_map(request, config)
    _fit(
        ("dataset's hidden size", dataset.hidden_size),
        ("drafter's target_hidden_size", config.target_hidden_size),
    )
    _fit(("dataset's taps", tuple(dataset.taps)), ("drafter's taps", tuple(config.taps)))
    _fit(
        ("draft vocabulary's size", vocabulary.size),
        ("drafter's draft_vocabulary_size", config.draft_vocabulary_size),
    )
    target = fingerprint(request.target)
    _fit(
        ("fingerprint of the target whose states the dataset holds", dataset.target_fingerprint),
        (f"fingerprint of {request.target}", target),
    )
    embedding, head = read_embedding(request.target), read_head(request.target)
    wanted = [config.target_vocabulary_size, config.target_hidden_size]
    _fit(("target's embedding", list(embedding.shape)), ("drafter's target sizes", wanted))
    _fit(("target's head", list(head.shape)), ("drafter's target sizes", wanted))
    _fit(
        ("target tokens that the draft vocabulary maps", vocabulary.target_size),
        ("target's vocabulary", wanted[0]),
    )
    data = {
        "dataset": dataset_digest(dataset),
        "draft_vocabulary": vocabulary_digest(vocabulary),
        "target": target,
        "warm_start": None
        if request.warm_start is None
        else sha256_file(request.warm_start / "model.safetensors"),
    }
    rows = head[vocabulary.target_ids].clone()  # the rest of the head is freed
    return Material(dataset, vocabulary, config, embedding, rows, warm, data)


def start_and_map(
    request: TrainRequest, config: DrafterConfig
) -> tuple[Drafter | None, DraftVocabulary]:
    """The drafter to go on from, and the map: a warm start keeps its own (B26).

    RequestError when the warm start is of another shape, other taps or another map.
    """
    given = request.draft_vocabulary
    if request.warm_start is None:
        assert given is not None  # the request refuses to be without both
        return None, DraftVocabulary.load(given)
    warm, kept, shape = load_exported(request.warm_start)
    if given is not None and not DraftVocabulary.load(given).same_as(kept):
        raise RequestError(
            f"{given}: maps other tokens than the drafter in {request.warm_start}",
            wanted="the map that the drafter's head was trained with",
            next_step="leave the draft vocabulary's file out, so that the drafter's own is kept",
        )
    old, new = shape.to_json(), config.to_json()
    # The export may promise a longer context than was trained; that changes no weight.
    different = [k for k in new if old[k] != new[k] and k != "max_position_embeddings"]
    if different:
        found = ", ".join(f"{k} {old[k]} against {new[k]}" for k in different)
        raise RequestError(
            f"{request.warm_start}: {found}",
            wanted="the drafter that the settings describe",
            next_step="set draft and extract.taps to those of the warm start, or train afresh",
        )
    return warm, kept


def require_labels(dataset: StateDataset) -> None:
    """NothingToTrain unless some training sample has a supervised token that a row is asked for.

    Row 0 is asked for token 2: the first two tokens of a sample are nobody's label. Masks are read
    only up to the first sample that has one.
    """
    if not any(
        bool(dataset.read(entry).supervised[2:].any())
        for entry in dataset.entries
        if entry.split == "train" and entry.supervised
    ):
        raise NothingToTrain(
            f"none of {len(dataset.entries)} samples is in the training split and has a supervised "
            "token beyond its first two",
            wanted="at least one",
            next_step="look at the counts of `make prepare`: template, lengths, held-out share",
        )


def dataset_digest(dataset: StateDataset) -> str:
    """Digest of what a dataset holds in which order, whatever its division into shards."""
    digest = hashlib.sha256()
    facts = [dataset.hidden_size, list(dataset.taps), dataset.target_fingerprint]
    digest.update(json.dumps(facts).encode())
    for entry in dataset.entries:
        line = [entry.id, entry.split, entry.length, entry.supervised, entry.digest]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()


def vocabulary_digest(vocabulary: DraftVocabulary) -> str:
    """Digest of the target ids of a draft vocabulary and of the target's size."""
    text = json.dumps([vocabulary.target_size, vocabulary.target_ids.tolist()])
    return hashlib.sha256(text.encode()).hexdigest()


def _fit(found: tuple[str, Any], wanted: tuple[str, Any]) -> None:
    if found[1] != wanted[1]:
        raise RequestError(
            f"train: {found[0]} is {found[1]}",
            wanted=f"{wanted[1]}, the {wanted[0]}",
            next_step="use states, draft vocabulary and drafter of one target: make extract",
        )
