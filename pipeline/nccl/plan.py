"""What to try next, and who wins: functions of the rows that are there, so a sweep can go on later.

The default is measured twice, which shows what one launch differs from another. Then groups of
candidates, each built on the best of the group before: protocol, algorithm, peer-to-peer level,
channels, buffer. Where the default itself does not work, the peer-to-peer level is tried first, for
lost writes between peers are why it usually does not; where that does not help, nothing more is
tried. What was best in the end is launched once more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.nccl.rows import Row, name_of

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Grid:
    """Values to try.

    LL128 is among protocols only when asked for: it can corrupt data where the hardware does not
    keep 128 bytes together. algorithms: of all-reduce alone, the only operation that has several on
    one host; told `Tree`, the others find no algorithm and fail (nccl#317; names since NCCL 2.24).
    """

    protocols: tuple[str, ...] = ("Simple", "LL")
    algorithms: tuple[str, ...] = ("Ring", "Tree")
    peer_levels: tuple[str, ...] = ("SYS", "LOC")
    least_channels: tuple[int, ...] = (8, 16, 32)
    most_channels: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"extraction": (4,)}
    )
    buffer_bytes: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "extraction": (1 << 20, 16 << 20),
            "training": (16 << 20, 32 << 20, 64 << 20),
        }
    )


@dataclass(frozen=True)
class Planned:
    """An environment to launch; launch 1 repeats it."""

    environment: dict[str, str]
    launch: int = 0


@dataclass(frozen=True)
class Verdict:
    """Who won for a use. environment None: nothing worked.

    gain: share of the default's score that is saved; spread: what it had to be above. Both None
    where the default does not work.
    """

    environment: dict[str, str] | None
    why: str
    score_seconds: float | None = None
    default_score_seconds: float | None = None
    gain: float | None = None
    spread: float | None = None


def pending(use: str, rows: Sequence[Row], grid: Grid) -> list[Planned]:
    """What of a use is to be run next, by order; empty when its winner is known."""
    rows = [row for row in rows if row.use == use]
    if not _launches(rows, {}):
        return [Planned({})]
    if _usable(rows, {}) and len(_launches(rows, {})) < 2:
        return [Planned({}, 1)]
    _, missing = _walk(use, rows, grid)
    if missing:
        return [Planned(environment) for environment in missing]
    return confirmation(use, rows, grid)


def confirmation(use: str, rows: Sequence[Row], grid: Grid) -> list[Planned]:
    """The second launches that the default and what is best so far lack."""
    rows = [row for row in rows if row.use == use]
    base, _ = _walk(use, rows, grid)
    both: list[dict[str, str]] = [{}, base] if base else [{}]
    once = [one for one in both if _usable(rows, one) and len(_launches(rows, one)) < 2]
    return [Planned(one, 1) for one in once]


def judge(use: str, rows: Sequence[Row], grid: Grid) -> Verdict:
    """The winner among the rows of a use, however many there are yet.

    It was launched twice without a fault, and even the slower of the two beats the faster of the
    default's by more than the spread (else the walk would not have come to it); otherwise the
    default wins.
    """
    rows = [row for row in rows if row.use == use]
    default = _launches(rows, {})
    best, _ = _walk(use, rows, grid)
    confirmed = best is not None and len(_launches(rows, best)) > 1
    if not _usable(rows, {}):
        reason = f"the default: {default[-1].status}" if default else "the default was not run"
        if not best or not confirmed:
            return Verdict(None, f"{reason}; nothing else was launched twice without a fault")
        return Verdict(dict(best), reason, score_seconds=_slower(rows, best))
    reference = _faster(rows, {})
    if not best:
        why = "nothing was faster by more than the spread"
        noise = _noise(rows, {}, {})
        return Verdict({}, why, reference, reference, gain=0.0, spread=noise)
    score, noise = _slower(rows, best), _noise(rows, {}, best)
    gain = 1 - score / reference
    values = {"default_score_seconds": reference, "gain": gain, "spread": noise}
    if not confirmed:
        return Verdict({}, f"{name_of(best)} was not launched a second time", reference, **values)
    return Verdict(dict(best), "faster than the default by more than the spread", score, **values)


def _walk(
    use: str, rows: Sequence[Row], grid: Grid
) -> tuple[dict[str, str] | None, list[dict[str, str]]]:
    """The best so far, group by group, and what the first unfinished group lacks.

    None: nothing works yet.
    """
    base: dict[str, str] | None = {} if _usable(rows, {}) else None
    groups = [_protocols, _algorithms, _peers, _channels, _buffers]
    if base is None:
        groups = [_peers, _protocols, _algorithms, _channels, _buffers]
    for group in groups:
        tried = group(use, base or {}, grid)
        missing = [one for one in tried if not _launches(rows, one)]
        working = [one for one in tried if _usable(rows, one)]
        if working:
            best = min(working, key=lambda one: _slower(rows, one))
            if base is None or _beats(rows, best, base):
                base = best
        if missing:
            return base, missing
        if base is None:  # neither the default nor going without peers: more would only take time
            break
    return base, []


def _beats(rows: Sequence[Row], one: Environment, base: Environment) -> bool:
    gain = 1 - _slower(rows, one) / _faster(rows, base)
    return gain > _noise(rows, base, one)


def _noise(rows: Sequence[Row], *environments: Environment) -> float:
    """The larger of what repetitions within launches and launches of the default differ by."""
    scores = [row.score for row in _launches(rows, {}) if row.status == "ok"]
    between = max(scores) / min(scores) - 1 if scores else 0.0
    within = [row.spread for one in environments for row in _launches(rows, one)]
    return max([between, *within])


def _launches(rows: Sequence[Row], environment: Environment) -> list[Row]:
    return [row for row in rows if row.environment == environment]


def _usable(rows: Sequence[Row], environment: Environment) -> bool:
    """Launched, and nothing ever went wrong with it."""
    found = _launches(rows, environment)
    return bool(found) and all(row.status == "ok" for row in found)


def _slower(rows: Sequence[Row], environment: Environment) -> float:
    return max(row.score for row in _launches(rows, environment))


def _faster(rows: Sequence[Row], environment: Environment) -> float:
    return min(row.score for row in _launches(rows, environment))


def _protocols(_use: str, base: Environment, grid: Grid) -> list[dict[str, str]]:
    return [{**base, "NCCL_PROTO": name} for name in grid.protocols]


def _algorithms(use: str, base: Environment, grid: Grid) -> list[dict[str, str]]:
    if use != "extraction":  # what training sends has a ring only
        return []
    return [{**base, "NCCL_ALGO": f"allreduce:{name}"} for name in grid.algorithms]


def _peers(_use: str, base: Environment, grid: Grid) -> list[dict[str, str]]:
    return [{**base, "NCCL_P2P_LEVEL": level} for level in grid.peer_levels]


def _channels(use: str, base: Environment, grid: Grid) -> list[dict[str, str]]:
    least = [{**base, "NCCL_MIN_NCHANNELS": str(count)} for count in grid.least_channels]
    most = grid.most_channels.get(use, ())
    return least + [{**base, "NCCL_MAX_NCHANNELS": str(count)} for count in most]


def _buffers(use: str, base: Environment, grid: Grid) -> list[dict[str, str]]:
    if base.get("NCCL_PROTO") in ("LL", "LL128"):  # NCCL_BUFFSIZE is Simple's
        return []
    sizes = grid.buffer_bytes.get(use, ())
    return [{**base, "NCCL_BUFFSIZE": str(size)} for size in sizes]
