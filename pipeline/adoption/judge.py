"""Which sample a request belongs to, and whether its four files belong to it and to one another.

Reads some rows of each file only; `take` reads all of them, when the request is wanted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pipeline.adoption.book import Book
from pipeline.adoption.dump import FILES, Request, opened, same
from pipeline.adoption.likeness import (
    Link,
    blocks_of,
    link,
    next_token_percentiles,
    rms_after_norm,
    row_peaks,
    rows_of,
)
from pipeline.adoption.torch_file import Piece, Unfit, locate, read_blocks, read_whole

FITS = "fits"
LEAST_PERCENTILE = 0.80
"""Of the next tokens; right samples have 0.99 of the supervised ones, wrong ones at most 0.73."""
_CHANCE = 1e-5  # of a wrong sample that passes, for few rows
_CERTAIN_MARGIN, _CERTAIN_ROWS = 0.10, 32  # then others need not be tried
LEAST_LINK = 0.85
"""Percentile of neighbours in depth; right ones have 0.89 at least, wrong ones 0.75 at most."""
LEAST_PART = 0.80
"""The same of each quarter of the rows: right ones have 0.86 at least."""
LEAST_HITS = 0.15
"""Right ones have 0.22 at least; the same file one row later 0.08 at most."""
NORM_TOLERANCE = 0.02
"""Of the root mean square; normed rows differ from 1 by 0.002, for bfloat16's sake."""
_LEAST_ROWS = 8  # fewer say too little
_LEAST_SUPERVISED = 4
_RIVAL_SHARE = 0.2  # of equal tokens at equal places: such samples could be taken for each other
_TWIN_SHARE = 0.9  # of equal tokens: then a longer sample must be clearly the worse one
_RIVAL_ROWS = 64
_DECISIVE_NATS, _DECISIVE_SHARE = 10.0, 0.6


@dataclass(frozen=True)
class Verdict:
    """What was decided of one request. outcome: FITS, or the reason why it is left out.

    sample: index of its sample, -1 without one. pieces: of FILES, when all could be located.
    scores: what was measured.
    """

    outcome: str
    detail: str = ""
    sample: int = -1
    pieces: tuple[Piece, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Back from the journal. KeyError, TypeError when it is none."""
        pieces = tuple(Piece(**piece) for piece in value["pieces"])
        return cls(**{**value, "pieces": pieces})


class Judge:
    """Decides requests of one dump for one target. Safe for threads.

    head and embedding [V, H] as stored; norm float32 [H], as read_norm gives it.
    """

    def __init__(
        self, root: Path, book: Book, *, head: Tensor, embedding: Tensor, norm: Tensor
    ) -> None:
        self._root, self._book = root, book
        self.head, self._embedding, self.norm = head, embedding, norm

    def judge(self, request: Request) -> Verdict:
        """Looks at some rows of each file; never raises for what is wrong with a request."""
        pieces: list[Piece] = []
        try:
            if request.problem:
                raise Unfit("link" if "link" in request.problem else "unreadable", request.problem)
            absent = [name for name, facts in zip(FILES, request.files, strict=True) if not facts]
            if absent:
                raise Unfit("incomplete", f"{', '.join(absent)} absent")
            with opened(self._root, request, FILES) as files:
                _unchanged(request, files)
                pieces += [locate(files[name], file=name) for name in FILES]
                sample, scores = self._match(request, files, pieces)
        except Unfit as unfit:
            return Verdict(unfit.reason, unfit.detail, pieces=tuple(pieces))
        except OSError as error:
            return Verdict("unreadable", str(error), pieces=tuple(pieces))
        return Verdict(FITS, sample=sample, pieces=tuple(pieces), scores=scores)

    def _match(
        self, request: Request, files: Mapping[str, int], pieces: Sequence[Piece]
    ) -> tuple[int, dict[str, float]]:
        rows = _one_size(pieces, width=len(self.norm))
        blocks = blocks_of(1, rows - 1)
        if rows - 2 < _LEAST_ROWS:
            raise Unfit("too_short", f"{rows} rows are too few to prove anything")
        final = _believed(read_blocks(files[FILES[-1]], pieces[-1], blocks), FILES[-1])
        self._normed(final, files, pieces, blocks)
        sample, percentile = self._find(
            request, final, blocks, lambda some: self._some(files, pieces, some)
        )
        twins = [(a, b) for a, b in combinations(range(4), 2) if pieces[a].crc == pieces[b].crc]
        for a, b in twins:
            raise Unfit("swapped", f"{FILES[a]} and {FILES[b]} hold the same bytes")
        first = min(self._book.shared(sample) + 1, rows // 2)
        blocks = blocks_of(first, rows)
        if rows - first < _LEAST_ROWS:
            raise Unfit("too_short", f"{rows - first} rows of its own are too few to prove it")
        states = [
            _believed(read_blocks(files[name], piece, blocks), name)
            for name, piece in zip(FILES, pieces, strict=True)
        ]
        ids = self._book.ids(sample)[rows_of(blocks)].long()
        chain = in_order(states)
        return sample, {
            "next_token": percentile,
            "embedding": link(self._embedding[ids], states[0]).percentile,
            **{f"link_{number}": found.percentile for number, found in enumerate(chain)},
        }

    def _some(self, files: Mapping[str, int], pieces: Sequence[Piece], rows: Tensor) -> Tensor:
        blocks = [(int(row), 1) for row in rows]
        return _believed(read_blocks(files[FILES[-1]], pieces[-1], blocks), FILES[-1])

    def _normed(
        self,
        final: Tensor,
        files: Mapping[str, int],
        pieces: Sequence[Piece],
        blocks: Sequence[tuple[int, int]],
    ) -> None:
        """Unfit unless the final state is what leaves the target's final norm."""
        if is_normed(final, self.norm):
            return
        for name, piece in zip(FILES[:-1], pieces[:-1], strict=True):
            rows = read_blocks(files[name], piece, blocks).bfloat16()
            if is_normed(rows, self.norm):
                raise Unfit("swapped", f"{name} is the final state, and final.pt is not")
        found = float(rms_after_norm(final, self.norm).median())
        raise Unfit(
            "not_normed",
            f"final.pt is not what leaves this target's final norm (root mean square {found:.3f}, "
            "wanted 1): taken before the norm, or of another target",
        )

    def _find(
        self, request: Request, final: Tensor, blocks: Sequence[tuple[int, int]], some: Any
    ) -> tuple[int, float]:
        """(index of the sample, its score). Unfit: no_length, no_match, short, ambiguous."""
        length = blocks[-1][0] + blocks[-1][1] + 1
        bucket = self._book.of_length(length)
        rows, states = rows_of(list(blocks)), final.float()
        best, margin = -1, -1.0
        if bucket:
            ids, flags = self._book.stack(length)
            for place in self._book.nearest(length, request.number):
                found = self._score(states, rows, ids[place], flags[place])[0]
                if found > margin:
                    best, margin = place, found
                if found >= _CERTAIN_MARGIN and len(rows) >= _CERTAIN_ROWS:
                    break
        if margin < 0:
            self._part_of(request, states, rows, length)
            if not bucket:
                raise Unfit("no_length", f"no sample has {length} tokens")
            raise Unfit(
                "no_match",
                f"none of {len(bucket)} samples of {length} tokens is what the final states "
                f"predict (best: {self._book.entries[bucket[best]].id}, percentile "
                f"{self._score(states, rows, ids[best], flags[best])[1]:.2f}): of another run or "
                "target",
            )
        best = self._against_rivals(best, request, length, some)
        return bucket[best], self._score(states, rows, ids[best], flags[best])[1]

    def _score(
        self, states: Tensor, rows: Tensor, ids: Tensor, flags: Tensor
    ) -> tuple[float, float]:
        """(what the percentile is above its bound, percentile) of a sample's next tokens.

        Of those that are supervised, where there are some, or of all, whichever says more.
        """
        labels = ids[rows + 1].long()
        logits = states @ self.head[labels].float().T
        percentiles = next_token_percentiles(logits, labels)
        chosen = flags[rows + 1]
        found = [percentiles]
        if int(chosen.sum()) >= _LEAST_SUPERVISED:
            found.append(percentiles[chosen])
        return max((float(some.mean()) - _bound(len(some)), float(some.mean())) for some in found)

    def _part_of(self, request: Request, states: Tensor, rows: Tensor, length: int) -> None:
        """Unfit `short` when a sample near the request's number begins with what is there."""
        for index in self._book.longer_near(length, request.number):
            ids, flags = self._book.ids(index), self._book.supervised(index)
            if self._score(states, rows, ids, flags)[0] >= 0:
                entry = self._book.entries[index]
                raise Unfit(
                    "short", f"{length} rows of the {entry.length} that sample {entry.id} has"
                )

    def _not_a_beginning(self, ids: Tensor, request: Request, some: Any) -> None:
        """Unfit `short` where a longer sample near the number begins almost like the one found."""
        for index in self._book.longer_near(len(ids), request.number):
            start = self._book.ids(index)[: len(ids)]
            share = float((start == ids).float().mean())
            if not _RIVAL_SHARE <= share < 1:
                continue
            won = self._better(ids, start, some)
            if won is False or (won is None and share >= _TWIN_SHARE):
                entry = self._book.entries[index]
                raise Unfit(
                    "short",
                    f"{len(ids)} rows, as of sample {entry.id}, which has {entry.length} tokens",
                )

    def _against_rivals(self, best: int, request: Request, length: int, some: Any) -> int:
        """The place that holds against all samples of the length that resemble it. Unfit."""
        ids, _ = self._book.stack(length)
        for _ in range(3):
            alike = (ids == ids[best]).float().mean(1)
            alike[best] = 0.0
            lost_to = -1
            for place in (alike >= _RIVAL_SHARE).nonzero()[:, 0].tolist():
                won = self._better(ids[best], ids[place], some)
                if won is None:
                    bucket = self._book.of_length(length)
                    a, b = (self._book.entries[bucket[one]].id for one in (best, place))
                    differ = int((ids[best] != ids[place]).sum())
                    raise Unfit("ambiguous", f"samples {a} and {b} differ in {differ} tokens only")
                if not won:
                    lost_to = place
                    break
            if lost_to < 0:
                self._not_a_beginning(ids[best], request, some)
                return best
            best = lost_to
        raise Unfit("ambiguous", "several samples resemble one another too much")

    def _better(self, a: Tensor, b: Tensor, some: Any) -> bool | None:
        """Whether the states predict a's tokens where two samples differ, or b's; None: neither."""
        differ = (a[1:] != b[1:]).nonzero()[:, 0]
        rows = differ[:: max(1, -(-len(differ) // _RIVAL_ROWS))]
        if not len(rows):
            return None
        states = some(rows).float()
        weights = self.head[a[rows + 1].long()].float() - self.head[b[rows + 1].long()].float()
        nats = (states * weights).sum(1)
        total, share = float(nats.sum()), float((nats > 0).float().mean())
        if total >= _DECISIVE_NATS and share >= _DECISIVE_SHARE:
            return True
        if total <= -_DECISIVE_NATS and 1 - share >= _DECISIVE_SHARE:
            return False
        return None


def _bound(rows: int) -> float:
    """The percentile that is wanted of so many rows: LEAST_PERCENTILE, more for fewer than 16.

    The mean of m uniform values is above 1 - s / m with a chance of s ** m / m! (for s <= 1, at
    most that beyond).
    """
    least = math.exp((math.log(_CHANCE) + math.lgamma(rows + 1)) / rows)
    return max(LEAST_PERCENTILE, 1 - least / rows)


def take(root: Path, request: Request, pieces: Sequence[Piece], norm: Tensor) -> list[Tensor]:
    """All rows of the four files, bfloat16 [n, H] each: every byte read, every row looked at.

    Unfit: changed, unreadable, damaged, not_finite, zero_row, not_normed.
    """
    states = []
    try:
        with opened(root, request, FILES) as files:
            _unchanged(request, files)
            for name, piece in zip(FILES, pieces, strict=True):
                states.append(_believed(read_whole(files[name], piece), name))
    except OSError as error:
        raise Unfit("unreadable", str(error)) from error
    off = (rms_after_norm(states[-1], norm) - 1).abs() > NORM_TOLERANCE
    if bool(off.any()):
        row = int(off.nonzero()[0])
        raise Unfit("not_normed", f"final.pt row {row} is not what leaves the final norm")
    return states


def is_normed(rows: Tensor, norm: Tensor) -> bool:
    """Whether every row is what leaves the final norm."""
    off = (rms_after_norm(rows, norm) - 1).abs()
    return bool((off <= NORM_TOLERANCE).all())


def in_order(states: Sequence[Tensor]) -> list[Link]:
    """Links aux_0 - aux_1 - aux_2 - final of some rows, proven. Unfit: swapped, mixed.

    The deeper a layer, the more it resembles the final state; and neighbours in depth find each
    other's rows. states: aux_0, aux_1, aux_2, final, each [m, H].
    """
    *aux, final = states
    depth = [link(one, final).cosine for one in aux]
    order = sorted(range(len(aux)), key=depth.__getitem__)
    chain = _chain([aux[number] for number in order] + [final])
    weakest = min(chain, key=lambda found: found.worst)
    if not all(map(_holds, chain)):
        pair = "/".join(FILES[number] for number in (*order, 3)[chain.index(weakest) :][:2])
        raise Unfit(
            "mixed",
            f"the rows of {pair} do not belong together (percentile {weakest.percentile:.2f}, "
            f"{weakest.worst:.2f} in the worst quarter; {weakest.hits:.0%} of rows find their own)",
        )
    if order != sorted(order):
        found = ", ".join(FILES[number] for number in order)
        raise Unfit("swapped", f"from low to high layers the files are {found}")
    return chain


def _holds(found: Link) -> bool:
    return found.percentile >= LEAST_LINK and found.worst >= LEAST_PART and found.hits >= LEAST_HITS


def _chain(states: Sequence[Tensor]) -> list[Link]:
    return [link(states[i], states[i + 1]) for i in range(len(states) - 1)]


def _one_size(pieces: Sequence[Piece], *, width: int) -> int:
    """Rows of all four files. Unfit: wrong_width, rows_differ."""
    widths, rows = [piece.width for piece in pieces], [piece.rows for piece in pieces]
    if set(widths) != {width}:
        raise Unfit("wrong_width", f"states of width {widths}; the target has {width}")
    if len(set(rows)) != 1:
        raise Unfit("rows_differ", f"{rows} rows in {', '.join(FILES)}")
    return rows[0]


def _believed(rows: Tensor, name: str) -> Tensor:
    """Rows in bfloat16, rounded as extract rounds what an engine computes. Unfit for bad rows."""
    rows = rows.bfloat16()
    peaks = row_peaks(rows)
    if not bool(torch.isfinite(peaks).all()):
        raise Unfit("not_finite", f"{name} holds values that are not finite")
    if not bool(peaks.all()):
        raise Unfit("zero_row", f"{name} has a row that is all zero")
    return rows


def _unchanged(request: Request, files: Mapping[str, int]) -> None:
    for name, facts in zip(FILES, request.files, strict=True):
        if not same(files[name], facts):
            raise Unfit("changed", f"{name} is another than when the dump was listed")
