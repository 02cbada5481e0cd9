"""verify: re-reads everything that is sealed, once, and says what is whole and what to redo."""

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pipeline.faults import Fault
from pipeline.slate.errors import SlateError
from pipeline.slate.files import json_bytes
from pipeline.slate.lock import lock
from pipeline.slate.manifest import Manifest, changed_files, differences
from pipeline.slate.progress import Progress
from pipeline.slate.wipe import MANIFEST, MARKER, marker_value
from pipeline.store.check import BadSample, StatesWatch, differing_samples
from pipeline.store.index import Entry, Sample, ShardIndex, counts_of
from pipeline.store.layout import SAMPLE_FIELDS, Field, state_fields
from pipeline.store.reader import PreparedSamples

_PREFIXES = {"prepare": "samples-", "extract": "states-"}
MENDABLE = frozenset({"marker", "spelling"})  # kinds of problems, in any stage
_REPAIRABLE = MENDABLE | {"file", "rows", "leftover"}  # in `extract`
LEFTOVER = ".repair.partial"  # the folder below `extract` in which a repair works
_SHARD, _INDEX = ".safetensors", ".json"
_NAMED = 20  # samples of one file on the screen; JSON has all
_CANNOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)  # then nobody works there either
Kind = Literal["file", "rows", "extra", "leftover", "marker", "spelling", "seal", "counts", "chain"]


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file of an output ("": the whole), and the samples that it costs.

    kind: `file`, one that changed; `rows`, states that no capture gives, in bytes as sealed;
    `extra`, what nobody sealed; `leftover`, of a repair that was killed; `marker` and `spelling`,
    which can be written again from the seal; `seal`, a manifest that cannot be believed; `counts`;
    `chain`, made from another input.
    """

    kind: Kind
    file: str
    what: str
    samples: tuple[BadSample, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """One stage's output. state `unsealed`: begun and not finished, which is no damage.

    next_step: what the person does about it; empty when it is whole.
    """

    stage: str
    state: Literal["whole", "damaged", "unsealed"]
    digest: str = ""
    files: int = 0
    bytes: int = 0
    problems: tuple[Problem, ...] = ()
    next_step: str = ""


@dataclass
class Shards:
    """The shards of a sealed output: indexes whose bytes are the sealed ones, and what they hold.

    lost: names of shards whose index is not.
    """

    fields: tuple[Field, ...]
    indexes: dict[str, ShardIndex] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        """All samples, in order."""
        return [entry for name in sorted(self.indexes) for entry in self.indexes[name].entries]


def verify_run(
    folder: Path, *, stages: Sequence[str], threads: int, container: str | None = None
) -> list[Verdict]:
    """Looks at every output of a run, in the order of the stages; one that is absent is left out.

    container: the name of the one that this process runs in, for who finds the run in use.
    LockHeld while another process works on it. A disk that became read-only can be looked at too.
    """
    if not folder.is_dir():
        return []
    with _held(folder, container):
        return look(folder, stages=stages, threads=threads)


@contextmanager
def _held(folder: Path, container: str | None) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(folder, purpose="verify", container=container))
        except SlateError as refused:
            cause = refused.__cause__
            if not (isinstance(cause, OSError) and cause.errno in _CANNOT_WRITE):
                raise
        yield


def look(folder: Path, *, stages: Sequence[str], threads: int) -> list[Verdict]:
    """As verify_run, for a caller who holds the run's lock."""
    verdicts: list[Verdict] = []
    digests: dict[str, str | None] = {}  # None: cannot be told
    prepared = _Prepared()
    for stage in stages:
        output = folder / stage
        path = output / MANIFEST
        if not path.is_symlink() and not path.exists():
            if output.is_symlink() or (output.is_dir() and any(output.iterdir())):
                verdicts.append(_unsealed(output))
            continue
        manifest, problems = read_seal(output)
        digests[stage] = manifest.digest if manifest else None
        if manifest is not None:
            problems = (*problems, *_chain(manifest, digests))
            try:
                shards = sealed_shards(output, manifest)
                changed = _bytes(output, manifest, shards, prepared=prepared, threads=threads)
                problems += tuple(changed)
                if not changed:
                    problems += tuple(_counts(manifest, shards, prepared))
                if stage == "prepare" and not problems:
                    prepared = _Prepared(PreparedSamples.open(output))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = f"contradicts itself: {type(error).__name__}: {error}"
                manifest, problems = None, (*problems, Problem("seal", MANIFEST, what))
        files = manifest.files if manifest else {}
        verdicts.append(
            Verdict(
                stage,
                "damaged" if problems else "whole",
                digests[stage] or "",
                len(files),
                sum(file.bytes for file in files.values()),
                problems,
                _next_step(stage, problems),
            )
        )
    return verdicts


class _Prepared:
    """The prepared samples by id, where they are whole."""

    def __init__(self, samples: PreparedSamples | None = None) -> None:
        self._samples = samples
        self._entries = {entry.id: entry for entry in samples.entries} if samples else {}

    @property
    def order(self) -> list[str] | None:
        """Their ids, in order."""
        return list(self._entries) if self._samples else None

    def __call__(self, name: str) -> Sample | None:
        entry = self._entries.get(name)
        return self._samples.read(entry) if self._samples and entry else None


def _unsealed(output: Path) -> Verdict:
    stage = output.name
    if not output.is_symlink() and (output / MARKER).is_file():
        step = f"make {stage} RESUME=1 continues it, make {stage} starts it over"
        return Verdict(stage, "unsealed", next_step=step)
    what = "is a link" if output.is_symlink() else f"has neither a {MANIFEST} nor {MARKER}"
    step = f"move {output} elsewhere, then: make {stage}"
    return Verdict(stage, "damaged", problems=(Problem("seal", "", what),), next_step=step)


def read_seal(output: Path) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """The seal of an output, where it can be read; and what is wrong with it or with the marker."""
    path = output / MANIFEST
    if path.is_symlink():
        return None, (Problem("seal", MANIFEST, "is a link"),)
    try:
        manifest = Manifest.read(output)
        text = path.read_bytes()
    except Fault as fault:
        return None, (Problem("seal", MANIFEST, f"cannot be believed: {fault.found}"),)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        return None, (Problem("seal", MANIFEST, what),)
    problems = []
    if text != json_bytes(json.loads(text)):
        what = "is spelled otherwise than it was sealed (same content)"
        problems.append(Problem("spelling", MANIFEST, what))
    if manifest.stage != output.name:
        problems.append(Problem("seal", MANIFEST, f"is the seal of {manifest.stage}"))
    if what := _marker_problem(output, manifest):
        problems.append(Problem("marker", MARKER, what))
    return manifest, tuple(problems)


def _marker_problem(output: Path, manifest: Manifest) -> str:
    """The marker is in no digest; but the seal says what must be in it."""
    path = output / MARKER
    if path.is_symlink() or not path.is_file():
        return "is gone or no plain file"
    try:
        same = path.read_bytes() == marker_bytes(manifest)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if same else "is not the one that the seal tells of"


def marker_bytes(manifest: Manifest) -> bytes:
    """What the marker beside a seal holds."""
    return json_bytes(marker_value(manifest.stage, manifest.intent))


def _chain(manifest: Manifest, digests: Mapping[str, str | None]) -> Iterator[Problem]:
    for name, wanted in manifest.inputs.items():
        found = digests.get(name, "")
        if found is not None and found != wanted:
            there = f"present is {found[:12]}" if found else f"{name} is not sealed now"
            yield Problem(
                "chain", "", f"was made from another {name} (digest {wanted[:12]}; {there})"
            )


def sealed_shards(output: Path, manifest: Manifest, *, spare: Path | None = None) -> Shards:
    """The indexes of an output of shards, as they were sealed; empty for other outputs.

    spare: a folder that may hold copies of them.
    """
    prefix = _PREFIXES.get(manifest.stage)
    if prefix is None:
        return Shards(())
    found = Shards(_fields(manifest))
    for name, file in manifest.files.items():
        if not (name.startswith(prefix) and name.endswith(_INDEX)):
            continue
        shard = name.removesuffix(_INDEX) + _SHARD
        places = [output / name, *([spare / name] if spare else [])]
        for place in places:
            try:
                if sha256(place.read_bytes()).hexdigest() == file.sha256:
                    found.indexes[shard] = ShardIndex.read(place)
                    break
            except (OSError, Fault):
                continue
        else:
            found.lost.append(shard)
    return found


def _fields(manifest: Manifest) -> tuple[Field, ...]:
    if manifest.stage == "prepare":
        return SAMPLE_FIELDS
    return state_fields(int(manifest.facts["hidden_size"]), taps=len(manifest.facts["taps"]))


def _bytes(
    output: Path,
    manifest: Manifest,
    shards: Shards,
    *,
    prepared: Callable[[str], Sample | None],
    threads: int,
) -> list[Problem]:
    """What the bytes say: changed files with the samples they cost, rows that no capture gives."""
    watches: dict[str, StatesWatch] = {}

    def watch(name: str) -> Callable[[memoryview], None]:
        if manifest.stage != "extract" or name not in shards.indexes:
            return lambda _piece: None
        watches[name] = StatesWatch(shards.indexes[name], shards.fields, prepared)
        return watches[name].see

    total = sum(file.bytes for file in manifest.files.values())
    with Progress(f"verify {manifest.stage}", total=total, unit="bytes") as progress:
        changed = changed_files(
            output,
            manifest,
            threads=threads,
            advance=progress.advance,
            direct=True,
            watch=watch,
        )
    bad = dict(changed)
    strange = {name: found for name, one in watches.items() if (found := one.found())}

    def explain(name: str) -> Problem:
        rows = tuple(strange.get(name, ()))
        if name not in bad:
            return Problem("rows", name, "holds rows that no capture gives", rows)
        what, index = bad[name], shards.indexes.get(name)
        if name == LEFTOVER:
            return Problem("leftover", name, "was left by a repair that was stopped")
        if name not in manifest.files:
            return Problem("extra", name, what)
        if index is None:
            return Problem("file", name, what)
        samples, header = differing_samples(output / name, index, shards.fields)
        if not samples:
            what += "; every sample's rows are right" + ("" if header else ", its header is not")
        known = {one.id for one in rows}
        return Problem(
            "file", name, what, (*rows, *(one for one in samples if one.id not in known))
        )

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(explain, sorted({*bad, *strange})))


def _counts(manifest: Manifest, shards: Shards, prepared: _Prepared) -> Iterator[Problem]:
    """Whether the counts of the seal are those of the shards, and their order the prepared one."""
    if manifest.stage not in _PREFIXES:
        return
    entries, counts = shards.entries, manifest.counts
    skipped = [pair for name in sorted(shards.indexes) for pair in shards.indexes[name].skipped]
    wanted = counts_of(entries, skipped)
    if manifest.stage == "prepare":  # what it left out is in no index
        wanted = {"kept": wanted["kept"]}
    for line in differences(wanted, {key: counts.get(key) for key in wanted}):
        yield Problem("counts", MANIFEST, f"counts other things than lie in the shards: {line}")
    if len({entry.id for entry in entries}) != len(entries):
        yield Problem("counts", "", "holds a sample twice")
    order = prepared.order
    if manifest.stage == "extract" and order is not None:
        left = {name for name, _ in skipped}
        if [entry.id for entry in entries] != [name for name in order if name not in left]:
            yield Problem(
                "counts", "", "does not hold exactly the prepared samples, in their order"
            )


def _next_step(stage: str, problems: Sequence[Problem]) -> str:
    kinds = {problem.kind for problem in problems}
    steps = []
    if extra := [problem.file for problem in problems if problem.kind == "extra"]:
        steps.append(f"move what nobody sealed elsewhere ({stage}/{extra[0]})")
    rest = kinds - {"extra"}
    if "seal" in rest and stage == "extract":
        steps.append(
            f"delete extract/{MANIFEST}; make extract RESUME=1 then proves every shard by its "
            "index and seals it again"
        )
    elif rest and (rest <= MENDABLE or (stage == "extract" and rest <= _REPAIRABLE)):
        steps.append("make repair")
    elif rest:
        steps.append(f"make {stage}")
    return ", then: ".join(steps)


def report(
    verdicts: Sequence[Verdict], *, folder: Path, stages: Sequence[str], as_json: bool
) -> Iterator[str]:
    """The verdicts, line by line, for people; or one JSON object for machines."""
    outside = []
    if folder.is_dir():
        outside = sorted(path.name for path in folder.iterdir() if path.name not in stages)
    if as_json:
        value = {
            "folder": str(folder),
            "whole": not any(verdict.problems for verdict in verdicts),
            "stages": [asdict(verdict) for verdict in verdicts],
            "not_covered": outside,
        }
        yield json.dumps(value, ensure_ascii=False, indent=1)
        return
    for verdict in verdicts:
        yield from _lines(verdict)
    if not verdicts:
        yield f"nothing is sealed in {folder}"
    if outside:
        yield f"in no seal, so not looked at: {', '.join(outside)}"


def _lines(verdict: Verdict) -> Iterator[str]:
    if verdict.state == "unsealed":
        yield f"{verdict.stage}: begun and not sealed; {verdict.next_step}"
        return
    yield f"{verdict.stage}: {verdict.state.replace('damaged', 'DAMAGED')} {verdict.digest}"
    for problem in verdict.problems:
        yield "  " + " ".join(part for part in (problem.file, problem.what) if part)
        yield from (f"    sample {bad}" for bad in problem.samples[:_NAMED])
        if len(problem.samples) > _NAMED:
            yield f"    and {len(problem.samples) - _NAMED} more samples (JSON=1 names all)"
    if verdict.next_step:
        yield f"  next: {verdict.next_step}"
