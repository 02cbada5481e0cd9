"""Driving an engine over planned shards: bounded work in flight, every sample decided once."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from pipeline.capture.collector import Wrong, collect
from pipeline.capture.contract import Answer, Engine, GroupDone, Receipt, Refusal, Request
from pipeline.capture.errors import CaptureError
from pipeline.capture.plan import plan_batches
from pipeline.capture.staging import Staging
from pipeline.slate.files import write_json
from pipeline.store.index import Entry, Sample, ShardIndex
from pipeline.store.layout import state_fields
from pipeline.store.reader import PreparedSamples
from pipeline.store.writer import PlannedSample, ShardBuilder

_GROUPS_AHEAD = 2  # one that the engine works on and one that waits for it


@dataclass(frozen=True)
class CapturePlan:
    """What is captured and how it is checked.

    shards: entries of each shard, in order. taps: layer ids. logprob_ids: samples whose engine
    log-probabilities are compared. difference: gives the greatest difference, in nats, between a
    sample's log-probabilities by the engine and from its stored final states [n, H].
    """

    shards: Sequence[Sequence[Entry]]
    taps: tuple[int, ...]
    hidden_size: int
    batch_tokens: int
    logprob_ids: frozenset[str]
    difference: Callable[[Sample, Tensor, Sequence[float]], float]
    file_timeout_seconds: float


@dataclass(frozen=True)
class _InFlight:
    """A sample that the engine has, the shard it is for and the group it was submitted in."""

    entry: Entry
    shard: int
    group: int


@dataclass
class _Shard:
    """A shard under construction, and the log-probability differences measured so far."""

    number: int
    builder: ShardBuilder
    undecided: int
    differences: dict[str, float] = field(default_factory=dict)


def shard_name(number: int) -> str:
    """Name of a shard's files, without the ending."""
    return f"states-{number:05d}"


def capture_states(
    engine: Engine,
    samples: PreparedSamples,
    *,
    plan: CapturePlan,
    finished: frozenset[int],
    folder: Path,
    staging: Staging,
    advance: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    """Captures every planned shard but the finished ones into `folder`.

    A sample whose answer is refused or not believed is run once more, alone; then it is left out
    with its reason. advance: called with rows kept; say: with each refusal. CaptureError when the
    engine answers for a sample it was not asked for, or twice.
    """
    run = _Run(engine, samples, plan, folder, staging, advance, say)
    groups = [
        (number, batch)
        for number, entries in enumerate(plan.shards)
        if number not in finished
        for batch in plan_batches(entries, batch_tokens=plan.batch_tokens)
    ]
    with ThreadPoolExecutor(1) as pool:
        try:
            run.go(groups, pool)
        finally:
            run.abandon()


class _Run:
    """State of one capture: open shards and samples in flight."""

    def __init__(
        self,
        engine: Engine,
        samples: PreparedSamples,
        plan: CapturePlan,
        folder: Path,
        staging: Staging,
        advance: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        self._engine, self._samples, self._plan = engine, samples, plan
        self._folder, self._staging, self._advance, self._say = folder, staging, advance, say
        self._fields = state_fields(plan.hidden_size, taps=len(plan.taps))
        self._shards: dict[int, _Shard] = {}
        self._flying: dict[str, _InFlight] = {}
        self._groups: dict[int, set[str]] = {}  # group number -> samples not yet answered
        self._retry: list[tuple[int, Entry]] = []
        self._retried: set[str] = set()
        self._submitted = 0
        self._finishing: list[Future[ShardIndex]] = []

    def go(self, groups: Sequence[tuple[int, Sequence[Entry]]], pool: ThreadPoolExecutor) -> None:
        """Submits groups ahead and handles answers until every sample is decided."""
        left = list(reversed(groups))
        answers = self._engine.answers()
        while left or self._groups or self._retry:
            while len(self._groups) < _GROUPS_AHEAD and (self._retry or left):
                if self._retry:
                    number, entry = self._retry.pop()
                    self._submit(number, [entry])
                else:
                    self._submit(*left.pop())
            self._handle(next(answers), pool)
            for future in [one for one in self._finishing if one.done()]:
                self._finishing.remove(future)
                future.result()
        for future in self._finishing:
            future.result()

    def abandon(self) -> None:
        """Removes the partial files of shards that did not get whole."""
        for shard in self._shards.values():
            shard.builder.abandon()

    def _submit(self, number: int, entries: Sequence[Entry]) -> None:
        if number not in self._shards:
            members = self._plan.shards[number]
            plan = [PlannedSample(entry.id, entry.length, entry.split) for entry in members]
            builder = ShardBuilder(self._folder, shard_name(number), fields=self._fields, plan=plan)
            self._shards[number] = _Shard(number, builder, len(members))
        requests = []
        for entry in entries:
            self._flying[entry.id] = _InFlight(entry, number, self._submitted)
            ids = self._samples.read(entry).input_ids
            requests.append(Request(entry.id, ids, entry.id in self._plan.logprob_ids))
        self._groups[self._submitted] = {entry.id for entry in entries}
        self._submitted += 1
        self._engine.submit(requests)

    def _handle(self, answer: Answer, pool: ThreadPoolExecutor) -> None:
        if isinstance(answer, GroupDone):
            if answer.number not in self._groups:
                raise CaptureError(
                    f"the engine finished group {answer.number}",
                    wanted=f"one of {sorted(self._groups)}, which are in flight",
                    next_step="this is a fault of the engine: please report it with the log",
                )
            for sample_id in sorted(self._groups[answer.number]):
                wrong = Wrong("no_answer", "the engine finished its group without an answer")
                self._refuse(sample_id, wrong, pool)
            del self._groups[answer.number]
            return
        if answer.id not in self._flying:
            raise CaptureError(
                f"the engine answered for {answer.id}, which is not in flight",
                wanted="one answer for each request",
                next_step="this is a fault of the engine: please report it with the log",
            )
        if isinstance(answer, Refusal):
            self._refuse(answer.id, Wrong(answer.reason, answer.detail), pool)
        else:
            self._keep(answer, pool)

    def _keep(self, receipt: Receipt, pool: ThreadPoolExecutor) -> None:
        flight = self._flying[receipt.id]
        number, entry = flight.shard, flight.entry
        sample = self._samples.read(entry)
        rows = collect(
            receipt,
            sample,
            staging=self._staging,
            taps=self._plan.taps,
            hidden_size=self._plan.hidden_size,
            timeout_seconds=self._plan.file_timeout_seconds,
        )
        if isinstance(rows, Wrong):
            self._refuse(receipt.id, rows, pool)
            return
        shard = self._shards[number]
        if entry.id in self._plan.logprob_ids:
            if receipt.logprobs is None or len(receipt.logprobs) != entry.length - 1:
                wrong = Wrong("logprobs", "no log-probabilities, or not one a token")
                self._refuse(receipt.id, wrong, pool)
                return
            shard.differences[entry.id] = self._plan.difference(
                sample, rows["final"], receipt.logprobs
            )
        shard.builder.place(entry.id, rows)
        self._land(receipt.id)
        self._advance(entry.length)
        self._decided(number, pool)

    def _refuse(self, sample_id: str, wrong: Wrong, pool: ThreadPoolExecutor) -> None:
        flight = self._land(sample_id)
        number, entry = flight.shard, flight.entry
        if sample_id not in self._retried:
            self._retried.add(sample_id)
            self._retry.append((number, entry))
            self._say(f"sample {sample_id}: {wrong.detail} ({wrong.reason}); trying it alone")
            return
        self._say(f"sample {sample_id}: {wrong.detail} ({wrong.reason}); left out")
        self._shards[number].builder.skip(sample_id, wrong.reason)
        self._decided(number, pool)

    def _land(self, sample_id: str) -> _InFlight:
        flight = self._flying.pop(sample_id)
        self._groups[flight.group].discard(sample_id)
        return flight

    def _decided(self, number: int, pool: ThreadPoolExecutor) -> None:
        shard = self._shards[number]
        shard.undecided -= 1
        if shard.undecided == 0:
            del self._shards[number]
            self._finishing.append(pool.submit(_finish, self._folder, shard))


def _finish(folder: Path, shard: _Shard) -> ShardIndex:
    # Before the index: a shard that counts as whole has its measurements beside it.
    write_json(folder / f"logprobs-{shard.number:05d}.json", shard.differences)
    try:
        return shard.builder.finish()
    finally:
        shard.builder.abandon()
