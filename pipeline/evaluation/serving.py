"""The drafter as a server runs it: a key-value cache, one chain at a time, one answer at a time.

The recursion is the trained one (training-time test). Row t holds tap t and the embedding of token
t + 1; its step-0 key and value stay in the cache. A chain starts at the last row t: step 0 attends
to rows <= t, step k feeds the output of step k - 1 and the embedding of draft k back in at rotary
position t + k and attends to rows <= t and to its own steps. Once the target has judged the drafts,
the rows of what it accepted are made again from its own taps, so no row ever keeps a guess.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.draft.model import Drafter
from pipeline.draft.rotary import rotate
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.evaluation.errors import WrongDrafter


class ServingDrafter:
    """A drafter with a cache, for one answer at a time: `start`, then `extend` and `propose`.

    drafter: in the dtype and on the device to serve in. vocabulary: its draft vocabulary.
    embedding [V, H]: the target's, on the same device. WrongDrafter when the three do not fit.
    """

    def __init__(self, drafter: Drafter, vocabulary: DraftVocabulary, *, embedding: Tensor) -> None:
        config = drafter.config
        wanted = (config.target_vocabulary_size, config.target_hidden_size)
        found = (vocabulary.target_size, embedding.shape[1])
        if (
            tuple(embedding.shape) != wanted
            or found != wanted
            or vocabulary.size != config.draft_vocabulary_size
        ):
            raise WrongDrafter(
                f"embedding {list(embedding.shape)}, draft vocabulary {vocabulary.size} of "
                f"{vocabulary.target_size}",
                wanted=f"embedding {list(wanted)} and {config.draft_vocabulary_size} draft tokens",
                next_step="evaluate the drafter with the target it was trained on",
            )
        self._drafter = drafter
        self._embedding = embedding
        self._target_ids: list[int] = vocabulary.target_ids.tolist()
        self.start(capacity=0)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's taps that `extend` wants, low to high."""
        return self._drafter.config.taps

    def start(self, *, capacity: int) -> None:
        """Forgets the last answer and makes room for `capacity` rows and chain steps together."""
        config, like = self._drafter.config, self._embedding
        shape = (config.kv_heads, capacity, config.head_dim)
        # The cache index of a key is its rotary position: row t at t, step k of its chain at t + k,
        # where the true row t + k later takes its place.
        self._key = like.new_empty(shape)
        self._value = like.new_empty(shape)
        self._rows = 0
        self._step = 0

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], taps: Tensor) -> None:
        """Adds rows: tokens [r], the one *after* each row; taps [r, 3H], the target's at the row.

        The last row is where the next chain starts.
        """
        hidden = self._drafter.fuse(taps)
        query, table = self._store(hidden, tokens, first=self._rows)
        self._rows += len(tokens)
        self._query = rotate(query[-1:], (table[0][-1:], table[1][-1:]))
        self._residual = hidden[-1:]

    @torch.inference_mode()
    def first(self) -> Tensor:
        """Logits [D] of step 0 at the last row; begins a chain, dropping one begun before."""
        self._step = 0
        return self._finish(self._query, self._residual)

    @torch.inference_mode()
    def follow(self, token: int) -> Tensor:
        """Logits [D] of the next step, after `token` (target id); `first` comes before."""
        self._step += 1
        residual = self._drafter.recurrent(self._hidden)
        place = self._rows - 1 + self._step
        query, table = self._store(residual, [token], first=place)
        return self._finish(rotate(query, table), residual)

    def propose(self, count: int) -> list[int]:
        """A greedy chain of `count` drafts from the last row, as target ids."""
        drafts: list[int] = []
        for _ in range(count):
            logits = self.follow(drafts[-1]) if drafts else self.first()
            drafts.append(self._target_ids[int(logits.argmax())])
        return drafts

    def _store(
        self, hidden: Tensor, tokens: Sequence[int], *, first: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Keeps keys and values of rows or steps from cache index `first` on; gives their queries.

        hidden [r, H] -> queries [r, heads, d], not rotated, and the rotary table of the rows.
        """
        device = hidden.device
        embeds = self._embedding[torch.tensor(tokens, device=device)]
        query, key, value = self._drafter.qkv(hidden, embeds)
        end = first + len(tokens)
        table = self._drafter.rotary(torch.arange(first, end, device=device))
        self._key[:, first:end] = rotate(key, table).transpose(0, 1)
        self._value[:, first:end] = value.transpose(0, 1)
        return query, table

    def _finish(self, query: Tensor, residual: Tensor) -> Tensor:
        """Attention over everything up to the current step, the rest of the layer, the head.

        query [1, heads, d], rotated; residual [1, H]. Gives logits [D].
        """
        config = self._drafter.config
        length = self._rows + self._step
        grouped = query.view(config.kv_heads, -1, config.head_dim)  # [kv, heads / kv, d]
        scores = grouped @ self._key[:, :length].transpose(1, 2) * config.head_dim**-0.5
        wide = torch.promote_types(scores.dtype, torch.float32)
        attended = scores.softmax(-1, dtype=wide).to(scores.dtype) @ self._value[:, :length]
        self._hidden = self._drafter.finish(residual, attended.view_as(query))
        return self._drafter.logits(self._hidden)[0]
