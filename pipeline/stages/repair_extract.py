"""One repair of `extract`: what is lost is captured by one start of the engine, and put in place.

Until the new manifest is written, last, the old one stands. What was captured and the sealed files
that are being replaced wait in a folder beside the shards: a repair that was killed goes on there.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.capture.drive import shard_name
from pipeline.faults import Fault
from pipeline.host.disk import free_bytes
from pipeline.host.facts import host_facts, source_commit, versions
from pipeline.slate.files import (
    disk_fault,
    fsync_directory,
    read_json,
    sha256_file,
    write_atomic,
    write_json,
)
from pipeline.slate.log import SAY
from pipeline.slate.manifest import Manifest, SealedFile, differences
from pipeline.slate.stage import Workspace, check_gpus, check_host
from pipeline.slate.wipe import MANIFEST, check_wipeable, claim, read_marker, wipe
from pipeline.stages.errors import NotProven, StageError
from pipeline.stages.extract import ExtractStage, spread
from pipeline.stages.extract_server import SERVER_FACTS
from pipeline.stages.repair_plan import Left, Lost, logprobs_name
from pipeline.stages.run import Run
from pipeline.stages.verify import (
    LEFTOVER,
    Verdict,
)
from pipeline.store.check import check_shard
from pipeline.store.index import ShardIndex
from pipeline.store.layout import ShardLayout, row_bytes
from pipeline.store.rewrite import read_rows, rewrite_shard

_EXTRACT = "extract"
_SEALED = "sealed"  # below LEFTOVER
_ROOM_BYTES = 64 << 20


def move_away(path: Path) -> StageError:
    """What a repair says of a thing in the way that it must not delete."""
    return StageError(
        f"{path} is nothing that this project wrote",
        wanted="the sealed files and nothing else",
        next_step=f"move {path} elsewhere, then: make repair",
    )


class Repair:
    """One repair of a sealed `extract` whose inputs are whole."""

    def __init__(self, run: Run, log: Path) -> None:
        self._run, self._log = run, log
        self._stage = ExtractStage(run)
        self._output = run.output(_EXTRACT)
        self._scratch = self._output / LEFTOVER
        self._manifest = Manifest.read(self._output)
        self._spares = self._scratch / _SEALED
        self._left = Left(run, self._manifest, output=self._output, spare=self._spares)
        self._files: dict[str, SealedFile] = dict(self._manifest.files)

    def go(self, verdict: Verdict) -> bool:
        """Repairs, proves and seals; whether the digest is another one now."""
        started = time.time()
        bad = {one.file: one for one in verdict.problems if one.kind in ("file", "rows")}
        for name in sorted(bad):
            if (self._output / name).is_dir() and not (self._output / name).is_symlink():
                raise move_away(self._output / name)
        with _disk_faults(self._output):
            bad = {name: one for name, one in bad.items() if not self._left.restored(name)}
            if not bad:  # also where a repair was killed after it had sealed
                self._clear()
                return False
            self._check_intent()
            self._claim()
            lost = self._left.lost(bad)
            captured = self._capture(lost)
            self._prove(lost, captured)
            for number in sorted(lost):
                self._replace(number, lost[number], captured.get(number))
            changed = self._seal(lost, captured, started)
            self._clear()
        return changed

    def _check_intent(self) -> None:
        found = self._manifest.intent
        if found["settings"].get("engine") == "adopted":
            raise StageError(
                f"{self._output} was adopted from an old dump, no engine of this project made it",
                wanted="states that an engine can capture again",
                next_step="make adopt with the same DUMP and SAMPLES; or make extract for new ones",
            )
        inputs = {name: Manifest.read(path).digest for name, path in self._stage.inputs.items()}
        intent = {"settings": dict(self._stage.decides), "inputs": inputs}
        if lines := differences(intent, found):
            raise StageError(
                f"{self._output} was captured with other settings:\n  " + "\n  ".join(lines[:12]),
                wanted="the same, so that what is captured again fits what is there",
                next_step="give the PROFILE, INPUT and SET that it was made with (make show)",
            )

    def _claim(self) -> None:
        """The folder for what is captured; kept from a repair of the same seal that was killed."""
        check_wipeable(self._scratch, root=self._output)
        intent = {"repairs": self._manifest.digest}
        marker = read_marker(self._scratch)
        if marker is None or marker.get("intent") != intent:
            wipe(self._scratch, root=self._output)
            claim(self._scratch, stage="repair", intent=intent)
        for path in self._scratch.glob(".*.partial"):
            path.unlink()
        self._spares.mkdir(exist_ok=True)

    def _clear(self) -> None:
        wipe(self._scratch, root=self._output)
        if self._scratch.is_dir():
            self._scratch.rmdir()

    def _capture(self, lost: Mapping[int, Lost]) -> dict[int, ShardIndex]:
        """What was captured of each shard, in the scratch folder: one start of the engine for all.

        What a killed repair captured already is proven and used.
        """
        settings, fields = self._run.settings.extract, self._left.shards.fields
        captured = {}
        for number, one in lost.items():
            if one.wanted and (index := self._captured(number, one)):
                captured[number] = index
        tokens = None if settings.engine == "sglang" else settings.batch_tokens
        shards = [
            lost[number].runs(batch_tokens=tokens) if number in lost else []
            for number in range(max(lost) + 1)
        ]
        todo = [number for number in lost if lost[number].wanted and number not in captured]
        self._check_room(lost, sum(one.length for number in todo for one in shards[number]))
        if not todo:
            return captured
        wanted = [one for n in todo for one in lost[n].members if one.id in lost[n].wanted]
        check_host(_EXTRACT, self._stage.gpus, self._run.place)
        dict(self._stage.environment)  # may be refused: run.nccl is read for it
        self._stage.check()
        check_gpus(self._stage.gpus, before=True)
        SAY.info(
            "repair: %d samples in %d shards are captured again%s: %s",
            len(wanted),
            len(todo),
            "" if tokens is None else ", in the batches that they were in",
            ", ".join(one.id for one in wanted[:20]) + (", ..." if len(wanted) > 20 else ""),
        )
        measured = {one for number in todo for one in lost[number].measure}
        try:
            self._stage.capture(
                Workspace(self._scratch, self._log, resume=False),
                shards,
                finished=frozenset(range(len(shards))) - {*todo},
                logprob_ids=spread(wanted, settings.logprob_samples) | measured,
            )
        finally:
            check_gpus(self._stage.gpus, before=False)
        for number in todo:
            index = ShardIndex.read(self._scratch / f"{shard_name(number)}.json")
            check_shard(self._scratch, index, fields=fields)
            captured[number] = index
        return captured

    def _captured(self, number: int, one: Lost) -> ShardIndex | None:
        """What an earlier try captured of a shard, if that is whole and enough; else it is gone."""
        path = self._scratch / f"{shard_name(number)}.json"
        try:
            if path.is_file():
                index = ShardIndex.read(path)
                check_shard(self._scratch, index, fields=self._left.shards.fields)
                named = {entry.id for entry in index.entries}
                if one.samples is None:
                    named |= {name for name, _ in index.skipped}
                if one.wanted <= named:
                    return index
        except Fault as fault:
            SAY.warning("repair: what was captured before is not used: %s", fault.found)
        self._forget(number)
        return None

    def _forget(self, number: int) -> None:
        name = shard_name(number)
        for file in (f"{name}.json", f"{name}.safetensors", logprobs_name(number)):
            (self._scratch / file).unlink(missing_ok=True)

    def _check_room(self, lost: Mapping[int, Lost], rows: int) -> None:
        """StageError unless the disk takes what is captured and one shard beside its old self."""
        sealed = self._left.shards
        sizes = [
            ShardLayout(sealed.fields, index.rows).file_bytes
            for number, one in lost.items()
            if one.rewrite
            if (index := sealed.indexes.get(f"{shard_name(number)}.safetensors"))
        ]
        needed = max(sizes, default=0) + int(rows * row_bytes(sealed.fields) * 1.02) + _ROOM_BYTES
        if (free := free_bytes(self._output)) < needed:
            raise StageError(
                f"{self._output}: {free >> 20} MiB free",
                wanted=f"{needed >> 20} MiB: the samples, and one shard beside the damaged one",
                next_step="free space there, then: make repair",
            )

    def _prove(self, lost: Mapping[int, Lost], captured: Mapping[int, ShardIndex]) -> None:
        """Every wanted sample was captured and agrees with the engine; else StageError."""
        for number, index in captured.items():
            one, there = lost[number], {entry.id for entry in index.entries}
            missing = sorted(one.wanted - there) if one.samples is not None else []
            if missing:
                reasons = dict(index.skipped)
                self._forget(number)
                raise StageError(
                    f"sample {missing[0]} could not be captured again: {reasons.get(missing[0])}"
                    + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
                    wanted="every sample that is lost",
                    next_step=f"see {self._log}, then: make repair (what it captured is kept), or "
                    "make extract",
                )
            tolerance = self._run.settings.extract.logprob_tolerance
            for name, difference in read_json(self._scratch / logprobs_name(number)).items():
                if difference <= tolerance:  # not so for NaN
                    continue
                self._forget(number)
                raise NotProven(
                    f"sample {name}: log-probabilities from the captured final states differ by "
                    f"{difference:.4f} nats from the engine's own",
                    wanted=f"at most extract.logprob_tolerance, {tolerance}",
                    next_step="is the target or the engine another one than that of the capture? "
                    "Nothing was changed; put it back, then: make repair",
                )

    def _replace(self, number: int, one: Lost, new: ShardIndex | None) -> None:
        """Puts a shard, its index and its measurements in place."""
        name, sealed = shard_name(number), self._left.shards
        shard, index_file, measured = f"{name}.safetensors", f"{name}.json", logprobs_name(number)
        if one.samples is None:
            assert new is not None
            if new.entries:
                (self._scratch / shard).replace(self._output / shard)
            else:
                (self._output / shard).unlink(missing_ok=True)
            (self._scratch / index_file).replace(self._output / index_file)
            (self._scratch / measured).replace(self._output / measured)
            fsync_directory(self._output)
            index = new
        else:
            index = sealed.indexes[shard]
            self._spare(index_file)
            self._spare(measured)
            if one.rewrite:
                rows = {
                    entry.id: partial(
                        read_rows, self._scratch / shard, new, entry, fields=sealed.fields
                    )
                    for entry in (new.entries if new else ())
                    if new and entry.id in one.samples
                }
                index = rewrite_shard(
                    self._output / shard, index, rows, fields=sealed.fields, scratch=self._scratch
                )
                index.write(self._output / index_file)
            self._measured(number, fresh=new is not None)
        if index.entries:
            check_shard(self._output, index, fields=sealed.fields)
        for file in (shard, index_file, measured):
            self._files.pop(file, None)
            if (self._output / file).is_file():
                self._files[file] = SealedFile(
                    (self._output / file).stat().st_size,
                    index.sha256 if file == shard else sha256_file(self._output / file),
                    volatile=file == measured,
                )

    def _spare(self, name: str) -> None:
        """Keeps a sealed file's bytes for a repair that goes on after a kill."""
        path = self._output / name
        if path.is_file() and sha256_file(path) == self._manifest.files[name].sha256:
            write_atomic(self._spares / name, path.read_bytes())

    def _measured(self, number: int, *, fresh: bool) -> None:
        """Adds the differences just measured to those of the shard that are still believed."""
        name = logprobs_name(number)
        path = self._output / name
        old: dict[str, float] = {}
        if path.is_file() and sha256_file(path) == self._manifest.files[name].sha256:
            old = read_json(path)
        added = read_json(self._scratch / name) if fresh else {}
        write_json(path, {**old, **added})

    def _seal(
        self, lost: Mapping[int, Lost], captured: Mapping[int, ShardIndex], started: float
    ) -> bool:
        """Writes the manifest with what was repaired; whether the digest is another one."""
        old, place = self._manifest, self._run.place
        outcome = self._stage.outcome(Workspace(self._output, self._log, resume=False))
        server = self._scratch / SERVER_FACTS
        record = {
            "samples": {
                shard_name(number): sorted(one.wanted) for number, one in sorted(lost.items())
            },
            "digest_before": old.digest,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.time() - started, 1),
            "host": host_facts(),
            "versions": versions(),
            "commit": place.commit or source_commit(Path(__file__).parent),
            "image": place.image,
            "server": read_json(server) if server.is_file() else None,
            "log": self._log.name,
        }
        repairs = [*old.provenance.get("repairs", []), record]
        manifest = replace(
            old,
            counts=outcome.counts,
            facts=outcome.facts,
            files=dict(sorted(self._files.items())),
            provenance={**old.provenance, "measured": dict(outcome.measured), "repairs": repairs},
        )
        manifest.write(self._scratch)  # the old one stands until this one is whole
        (self._scratch / MANIFEST).replace(self._output / MANIFEST)
        fsync_directory(self._output)
        count = sum(len(one.wanted) for one in lost.values())
        if manifest.digest == old.digest:
            SAY.info(
                "repair: %d samples in %d shards captured again, every byte as it was sealed; "
                "digest %s as before, what was made from it stays valid",
                count,
                len(captured),
                manifest.digest,
            )
            return False
        SAY.info("repair: sealed, digest %s (before: %s)", manifest.digest, old.digest)
        return True


@contextmanager
def _disk_faults(output: Path) -> Iterator[None]:
    """A full or failing disk, as a fault that says how to go on."""
    try:
        yield
    except OSError as error:
        fault = disk_fault(error, place=output, next_step="make repair (the old seal stands)")
        if fault is None:
            raise
        raise fault from error
