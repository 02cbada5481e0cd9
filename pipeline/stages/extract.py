"""extract: the target's states for every token of every sample, proven complete."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.capture.child_engine import ChildEngine
from pipeline.capture.contract import Engine
from pipeline.capture.drive import CapturePlan, capture_states, shard_name
from pipeline.capture.plan import plan_shards
from pipeline.capture.staging import Staging
from pipeline.draft.export import check_target
from pipeline.host.disk import existing_parent, filesystem, free_bytes
from pipeline.settings.environment import child_environment
from pipeline.slate.child import Child
from pipeline.slate.errors import SlateError
from pipeline.slate.files import read_json
from pipeline.slate.log import SAY, log_only
from pipeline.slate.progress import Progress
from pipeline.slate.reread import past_the_cache
from pipeline.slate.stage import Outcome, Workspace
from pipeline.slate.wipe import check_wipeable, claim, wipe
from pipeline.stages.errors import NotProven, StageError, TooFew
from pipeline.stages.extract_server import (
    SERVER_FACTS,
    check_server,
    environment_of,
    server_decides,
    serving,
)
from pipeline.stages.run import Run, device_of
from pipeline.stages.train import drafter_config
from pipeline.store.check import check_shard, check_states
from pipeline.store.errors import ShardDamaged
from pipeline.store.index import Entry, Sample, ShardIndex, counts_of
from pipeline.store.layout import row_bytes, state_fields
from pipeline.store.reader import DatasetFacts, PreparedSamples, StateDataset
from pipeline.target.facts import fingerprint
from pipeline.target.tensors import check_ends, read_head

_FILE_TIMEOUT_SECONDS = 60.0
_LOGIT_ROWS = 256  # rows of logits [rows, V] that exist at once in the comparison


class ExtractStage:
    """Runs the engine over the prepared samples into shards of states."""

    name = "extract"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._settings = run.settings.extract

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPUs of the engine."""
        return self._settings.gpus

    @property
    def inputs(self) -> Mapping[str, Path]:
        """The prepared samples, and the target when it is made here."""
        return {**self._run.target_inputs(), "prepare": self._run.output("prepare")}

    @property
    def decides(self) -> Mapping[str, Any]:
        """Engine, taps, precision and the plan of batches and shards."""
        names = {"engine", "taps", "compute_dtype", "batch_tokens", "shard_bytes"}
        served = {"server": server_decides(self._run)} if self._served else {}
        return {
            **self._settings.model_dump(mode="json", include=names),
            "target": self._run.target_decides(),
            **served,
        }

    @property
    def environment(self) -> Mapping[str, str]:
        """Of the engine's process."""
        if self._served:
            return environment_of(self._run, staging=self._staging)
        return self._run.environment(gpus=self.gpus)

    @property
    def _served(self) -> bool:
        return self._settings.engine == "sglang"

    @property
    def _staging(self) -> Path:
        return self._run.settings.staging_folder

    def check_target(self) -> None:
        """Target, taps and drafter go together. StageError and faults of their rooms."""
        settings, facts = self._settings, self._run.target_facts()
        check_ends(self._run.target_folder)
        if settings.taps[-1] >= facts.layers:
            raise StageError(
                f"extract.taps names layer {settings.taps[-1]}, the target has {facts.layers}",
                wanted=f"layers 0 to {facts.layers - 1}",
                next_step="correct extract.taps",
            )
        # Hours of capture are in vain where no drafter can be trained on it, or exported.
        drafter = drafter_config(self._run.settings.draft, facts, taps=settings.taps)
        check_target(drafter, facts, settings.taps)

    def check(self) -> int:
        """Target and drafter that fit, taps, the quota against the largest sample, the tmpfs."""
        settings, facts = self._settings, self._run.target_facts()
        self.check_target()
        fields = state_fields(facts.hidden_size, taps=len(settings.taps))
        samples = PreparedSamples.open(self._run.output("prepare"))
        largest = max(samples.entries, key=lambda entry: entry.length)
        if largest.length * row_bytes(fields) > settings.staging_quota_bytes:
            raise StageError(
                f"sample {largest.id} has {largest.length} tokens of {row_bytes(fields)} bytes",
                wanted=f"at most extract.staging_quota_bytes, {settings.staging_quota_bytes}",
                next_step="raise the quota, or lower prepare.max_length and prepare again",
            )
        if self._served:
            check_server(self._run, largest_bytes=largest.length * row_bytes(fields))
        # One sample that is being read is mapped when its file no longer counts.
        needed = settings.staging_quota_bytes + largest.length * row_bytes(fields)
        free = free_bytes(self._staging)
        if free < needed:
            raise StageError(
                f"{existing_parent(self._staging)} ({filesystem(self._staging)}) has "
                f"{free >> 20} MiB free",
                wanted=f"the staging quota and one sample, {-(-needed >> 20)} MiB",
                next_step="free it, enlarge the tmpfs, or lower extract.staging_quota_bytes",
            )
        check_wipeable(self._staging, root=settings.staging.absolute())
        total = sum(entry.length for entry in samples.entries)
        return int(total * row_bytes(fields) * 1.02) + (64 << 20)

    def run(self, workspace: Workspace) -> None:
        """Captures every shard that is not there and whole already."""
        samples = PreparedSamples.open(self._run.output("prepare"))
        shards, finished = self._plan(samples, workspace)
        measured = spread(samples.entries, self._settings.logprob_samples)
        self.capture(workspace, shards, finished=finished, logprob_ids=measured)
        self._write_facts(workspace.output, len(shards))

    def _plan(
        self, samples: PreparedSamples, workspace: Workspace
    ) -> tuple[list[list[Entry]], frozenset[int]]:
        """The samples of each shard, and the numbers of shards that are there and whole already."""
        fields = state_fields(self._run.target_facts().hidden_size, taps=len(self._settings.taps))
        shards = plan_shards(
            samples.entries, row_bytes=row_bytes(fields), shard_bytes=self._settings.shard_bytes
        )
        finished = self._finished(workspace, shards, fields) if workspace.resume else frozenset()
        return shards, finished

    def _write_facts(self, output: Path, shards: int) -> None:
        DatasetFacts(
            self._run.target_facts().hidden_size,
            self._settings.taps,
            fingerprint(self._run.target_folder),
            shards,
        ).write(output)

    def capture(
        self,
        workspace: Workspace,
        shards: Sequence[Sequence[Entry]],
        *,
        finished: frozenset[int],
        logprob_ids: frozenset[str],
    ) -> None:
        """Runs the engine over samples of `prepare`, into shards below workspace.output.

        shards: the samples of each; finished: numbers of those that are there already. logprob_ids:
        samples whose log-probabilities are compared. The engine is started once, and stopped.
        """
        settings, facts = self._settings, self._run.target_facts()
        samples = PreparedSamples.open(self._run.output("prepare"))
        root = settings.staging.absolute()
        wipe(self._staging, root=root)
        claim(self._staging, stage="staging", intent={})
        total = sum(entry.length for shard in shards for entry in shard)
        already = sum(entry.length for n in finished for entry in shards[n])
        head = read_head(self._run.target_folder)
        staging = Staging(self._staging, quota_bytes=settings.staging_quota_bytes)
        try:
            with (
                self._engine(samples, staging, workspace) as engine,
                Progress("extract", total=total, unit="tokens", already=already) as progress,
            ):
                capture_states(
                    engine,
                    samples,
                    plan=CapturePlan(
                        shards=shards,
                        taps=settings.taps,
                        hidden_size=facts.hidden_size,
                        batch_tokens=settings.batch_tokens,
                        logprob_ids=logprob_ids,
                        difference=lambda sample, final, logprobs: greatest_difference(
                            sample, final, logprobs, head=head
                        ),
                        file_timeout_seconds=_FILE_TIMEOUT_SECONDS,
                    ),
                    finished=finished,
                    folder=workspace.output,
                    staging=staging,
                    advance=progress.advance,
                    say=lambda line: SAY.warning("%s", line),
                )
        finally:
            wipe(self._staging, root=root)
            self._staging.rmdir()

    @contextmanager
    def _engine(
        self, samples: PreparedSamples, staging: Staging, workspace: Workspace
    ) -> Iterator[Engine]:
        """The engine that the settings name, running."""
        if self._served:
            with serving(
                self._run, staging=staging, log=workspace.log, output=workspace.output
            ) as served:
                yield served
            return
        with Child(
            "pipeline.capture.worker",
            environment=child_environment(self.environment),
            log=workspace.log,
            silence_seconds=self._run.settings.run.silence_seconds,
            request=self._request(),
        ) as child:
            numbers = {entry.id: number for number, entry in enumerate(samples.entries)}
            yield ChildEngine(child, numbers=numbers)

    def _request(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "engine": settings.engine,
            "folder": str(self._run.target_folder),
            "prepared": str(self._run.output("prepare")),
            "staging": str(self._staging),
            "quota_bytes": settings.staging_quota_bytes,
            "taps": list(settings.taps),
            "hidden_size": self._run.target_facts().hidden_size,
            "dtype": settings.compute_dtype,
            "device": device_of(settings.gpus),
            "remote_code": self._run.settings.target.remote_code,
            "threads": self._run.threads,
        }

    def _finished(
        self, workspace: Workspace, shards: Sequence[Sequence[Entry]], fields: Any
    ) -> frozenset[int]:
        """Shards of an earlier try that are whole: index there, members as planned, bytes proven.

        Whatever else lies there is removed and captured again.
        """
        found = [*workspace.output.glob("states-*.safetensors")]
        direct = past_the_cache(sum(path.lstat().st_size for path in found))

        def whole(number: int) -> bool:
            path = workspace.output / f"{shard_name(number)}.json"
            if not path.exists():
                return False
            try:
                index = ShardIndex.read(path)
                named = {entry.id for entry in index.entries} | {name for name, _ in index.skipped}
                if path.is_symlink() or (workspace.output / index.shard).is_symlink():
                    SAY.warning("extract: %s or its shard is a link: captured again", path)
                    return False
                if named != {entry.id for entry in shards[number]}:
                    return False
                check_shard(workspace.output, index, fields=fields, direct=direct)
            except (ShardDamaged, SlateError) as damaged:
                SAY.warning("extract: captured again: %s", damaged.found)
                return False
            return True

        keep = set()
        with (
            Progress("extract: looking for whole shards", total=len(shards), unit="shards") as done,
            ThreadPoolExecutor(self._run.threads) as pool,
        ):
            for number, kept in enumerate(pool.map(whole, range(len(shards)))):
                done.advance(1)
                if kept:
                    keep.add(number)
        for path in workspace.output.glob("states-*"):
            if int(path.stem.removeprefix("states-")) not in keep:
                path.unlink()
        SAY.info("extract: %d of %d shards are whole already", len(keep), len(shards))
        return frozenset(keep)

    def verify(self, workspace: Workspace) -> Outcome:
        """Every prepared sample once, every byte as its index says, log-probabilities agree."""
        total = sum(entry.length for entry in StateDataset.open(workspace.output).entries)
        with Progress("extract: verifying", total=total, unit="rows") as progress:
            for rows in check_states(workspace.output, threads=self._run.threads):
                progress.advance(rows)
        return self.outcome(workspace)

    def outcome(self, workspace: Workspace) -> Outcome:
        """As `verify`, for shards whose bytes are proven already."""
        samples = PreparedSamples.open(self._run.output("prepare"))
        dataset = StateDataset.open(workspace.output)
        total = sum(entry.length for entry in dataset.entries)
        check_complete(samples, dataset)
        reasons = Counter(reason for _, reason in dataset.skipped)
        kept, read = len(dataset.entries), len(samples.entries)
        if kept < self._settings.least_kept_share * read:
            raise TooFew(
                f"{kept} of {read} samples captured; left out: {dict(reasons)}",
                wanted=f"at least {self._settings.least_kept_share:.0%}",
                next_step=f"read the reasons in {workspace.log}, mend, then make extract",
            )
        differences: dict[str, float] = {}
        for path in sorted(workspace.output.glob("logprobs-*.json")):
            differences |= read_json(path)
        greatest = self._greatest(differences)
        log_only(f"log-probability differences: {differences}")
        SAY.info(
            "extract: %d samples kept, %d left out, %d rows; log-probabilities of %d samples "
            "agree within %.4f nats",
            kept,
            len(dataset.skipped),
            total,
            len(differences),
            greatest,
        )
        return Outcome(
            counts=counts_of(dataset.entries, dataset.skipped),
            facts=facts_of(dataset),
            measured={
                "logprob_samples": len(differences),
                "logprob_greatest_difference_nats": greatest,
                "logprob_tolerance_nats": self._settings.logprob_tolerance,
                "staging_filesystem": filesystem(self._settings.staging),
                **({"server": read_json(workspace.output / SERVER_FACTS)} if self._served else {}),
            },
            known_digests=digests_of(dataset),
            volatile=lambda name: name.startswith("logprobs-") or name == SERVER_FACTS,
        )

    def _greatest(self, differences: Mapping[str, float]) -> float:
        if not differences:
            raise NotProven(
                "no sample's log-probabilities were compared",
                wanted="at least one",
                next_step="make extract starts over; if it stays so, report it",
            )
        name, greatest = max(differences.items(), key=lambda item: item[1])
        if not greatest <= self._settings.logprob_tolerance:
            raise NotProven(
                f"sample {name}: log-probabilities from the stored final states differ by "
                f"{greatest:.4f} nats from the engine's own",
                wanted=f"at most extract.logprob_tolerance, {self._settings.logprob_tolerance}",
                next_step="the final state may be before the norm, or of another target",
            )
        return greatest


def spread(entries: Sequence[Entry], count: int) -> frozenset[str]:
    """Ids of `count` samples at even distances over the data set, of at least two tokens."""
    usable = [entry.id for entry in entries if entry.length > 1]
    count = min(count, len(usable))
    return (
        frozenset(usable[i * len(usable) // count] for i in range(count)) if count else frozenset()
    )


def facts_of(dataset: StateDataset) -> dict[str, Any]:
    """What is true of states, whoever captured them."""
    return {
        "taps": list(dataset.taps),
        "hidden_size": dataset.hidden_size,
        "target_fingerprint": dataset.target_fingerprint,
    }


def digests_of(dataset: StateDataset) -> dict[str, str]:
    """sha256 of each shard's file, as its index has it."""
    return {index.shard: index.sha256 for index in dataset.indexes if index.entries}


def check_complete(samples: PreparedSamples, dataset: StateDataset) -> None:
    """Every prepared sample is in exactly one shard or in the skip list. StageError otherwise."""
    skipped = Counter(name for name, _ in dataset.skipped)
    present = {entry.id: entry for entry in dataset.entries}
    for entry in samples.entries:
        found = (entry.id in present) + skipped[entry.id]
        if found != 1:
            raise NotProven(
                f"sample {entry.id} is {'nowhere' if not found else f'in {found} places'}",
                wanted="exactly one shard or the skip list",
                next_step="make extract starts over; if it stays so, report it",
            )
        if entry.id in present:
            states, sample = dataset.read(present[entry.id]), samples.read(entry)
            if not (
                torch.equal(states.input_ids, sample.input_ids)
                and torch.equal(states.supervised, sample.supervised)
                and present[entry.id].split == entry.split
            ):
                raise NotProven(
                    f"sample {entry.id}: ids, mask or split differ from the prepared sample",
                    wanted="the sample as it was prepared",
                    next_step="make extract starts over; if it stays so, report it",
                )
    if len(present) + len(dataset.skipped) != len(samples.entries):
        raise NotProven(
            f"{len(present)} kept and {len(dataset.skipped)} left out",
            wanted=f"{len(samples.entries)} in all, as prepared",
            next_step="make extract starts over; if it stays so, report it",
        )


def greatest_difference(
    sample: Sample, final: Tensor, logprobs: Sequence[float], *, head: Tensor
) -> float:
    """Greatest |engine - lm_head(final)| of log p(x_{t+1}), nats, over a sample's tokens.

    final [n, H] bf16 as stored; logprobs n - 1 values by the engine; head [V, H].
    """
    greatest = 0.0
    for start in range(0, len(logprobs), _LOGIT_ROWS):
        stop = min(start + _LOGIT_ROWS, len(logprobs))
        logits = final[start:stop].float() @ head.float().T
        labels = sample.input_ids[start + 1 : stop + 1].long()
        own = torch.log_softmax(logits, dim=-1).gather(1, labels[:, None])[:, 0]
        engine = torch.tensor(logprobs[start:stop], dtype=torch.float32)
        greatest = max(greatest, float((own - engine).abs().max()))
    return greatest
