"""What a damaged `extract` has lost: what can be written back from what is left, and what not."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from pipeline.capture.drive import shard_name
from pipeline.capture.plan import plan_batches, plan_shards
from pipeline.slate.files import json_bytes, write_atomic
from pipeline.slate.log import SAY
from pipeline.slate.manifest import Manifest
from pipeline.stages.errors import StageError
from pipeline.stages.extract import spread
from pipeline.stages.run import Run
from pipeline.stages.verify import Problem, Shards, sealed_shards
from pipeline.store.check import differing_samples
from pipeline.store.errors import ShardDamaged
from pipeline.store.index import Entry
from pipeline.store.layout import row_bytes
from pipeline.store.reader import DatasetFacts, PreparedSamples
from pipeline.store.rewrite import rebuild_index

_LOGPROBS = "logprobs-"


@dataclass
class Lost:
    """What is to be done with one shard.

    members: prepared samples planned for it. samples: ids to capture again; None: all of it, as its
    index is lost too. measure: ids whose rows are right, but not the record of their
    log-probabilities. rewrite: whether the shard's file is to be written again.
    """

    members: Sequence[Entry]
    samples: set[str] | None = field(default_factory=set)
    measure: set[str] = field(default_factory=set)
    rewrite: bool = False

    @property
    def wanted(self) -> set[str]:
        """Ids that the engine must give."""
        return (
            {one.id for one in self.members}
            if self.samples is None
            else (self.samples | self.measure)
        )

    def runs(self, *, batch_tokens: int | None) -> list[Entry]:
        """What the engine runs: the samples, and the rest of their batches where that is asked for.

        A sample's last bits depend on the batch that it is computed in.
        """
        ids = self.wanted
        if batch_tokens is None:
            return [entry for entry in self.members if entry.id in ids]
        batches = plan_batches(self.members, batch_tokens=batch_tokens)
        run = {one.id for batch in batches if ids & {one.id for one in batch} for one in batch}
        return [entry for entry in self.members if entry.id in run]


class Left:
    """What is left of a sealed output of `extract`.

    spare: a folder for files as they were sealed, kept while they are replaced.
    """

    def __init__(self, run: Run, manifest: Manifest, *, output: Path, spare: Path) -> None:
        self._run, self._manifest = run, manifest
        self._output, self.spare = output, spare
        self.fields = sealed_shards(output, manifest).fields

    @cached_property
    def shards(self) -> Shards:
        """The sealed indexes, asked for first when all that can be written back is."""
        return sealed_shards(self._output, self._manifest, spare=self.spare)

    @cached_property
    def _samples(self) -> tuple[Entry, ...]:
        return PreparedSamples.open(self._run.output("prepare")).entries

    def restored(self, name: str) -> bool:
        """Writes a small file back where what is left tells every byte of it."""
        if name.endswith(".safetensors"):
            return False
        wanted = self._manifest.files[name].sha256
        for text in self._candidates(name):
            if sha256(text).hexdigest() == wanted:
                write_atomic(self._output / name, text)
                SAY.info("repair: %s: written again, byte for byte as it was sealed", name)
                return True
        return False

    def _candidates(self, name: str) -> Iterator[bytes]:
        manifest, measured = self._manifest, self._manifest.provenance["measured"]
        spare = self.spare / name
        if spare.is_file():
            yield spare.read_bytes()
        if name == "dataset.json":
            indexes = [one for one in manifest.files if is_index(one)]
            facts = DatasetFacts(
                int(manifest.facts["hidden_size"]),
                tuple(manifest.facts["taps"]),
                str(manifest.facts["target_fingerprint"]),
                len(indexes),
            )
            with tempfile.TemporaryDirectory() as folder:
                facts.write(Path(folder))
                yield (Path(folder) / name).read_bytes()
        elif name.startswith(_LOGPROBS):
            yield json_bytes({})
        elif is_index(name):
            shard = Path(name).with_suffix(".safetensors").name
            sealed = manifest.files.get(shard)
            members = self._planned.get(shard)
            if sealed and members:
                with suppress(OSError, ShardDamaged):  # then the shard is no whole one
                    path = self._output / shard
                    index = rebuild_index(path, members, sha256=sealed.sha256, fields=self.fields)
                    if index:
                        yield json_bytes(asdict(index))
        elif "server" in measured:
            yield json_bytes(measured["server"])

    @cached_property
    def _planned(self) -> dict[str, list[Entry]]:
        """The samples of each shard, by its file's name, as extract plans them."""
        shards = plan_shards(
            self._samples,
            row_bytes=row_bytes(self.fields),
            shard_bytes=self._run.settings.extract.shard_bytes,
        )
        return {f"{shard_name(n)}.safetensors": shard for n, shard in enumerate(shards)}

    def lost(self, bad: Mapping[str, Problem]) -> dict[int, Lost]:
        """What each damaged shard needs, by number. StageError for a file that cannot be made."""
        planned, sealed = self._planned, self.shards
        numbers = {name: number for number, name in enumerate(planned)}
        measured = spread(self._samples, self._run.settings.extract.logprob_samples)
        lost: dict[int, Lost] = {}
        for name, problem in bad.items():
            kind, _, digits = Path(name).stem.partition("-")
            shard = f"states-{digits}.safetensors"
            if kind not in ("states", "logprobs") or shard not in numbers:
                raise StageError(
                    f"{self._output / name} {problem.what}",
                    wanted="a file that can be made again from what is left",
                    next_step="make extract",
                )
            one = lost.setdefault(numbers[shard], Lost(planned[shard]))
            index = sealed.indexes.get(shard)
            if index is None:
                one.samples = None
            elif kind == "logprobs":
                one.measure |= measured & {entry.id for entry in index.entries}
            elif one.samples is not None:
                found, _ = differing_samples(self._output / shard, index, sealed.fields)
                one.samples |= {sample.id for sample in (*found, *problem.samples)}
                one.rewrite = True
        return lost


def is_index(name: str) -> bool:
    """Whether a file of `extract` is the index of a shard."""
    return name.startswith("states-") and name.endswith(".json")


def logprobs_name(number: int) -> str:
    """The file of a shard's log-probability differences."""
    return f"{_LOGPROBS}{number:05d}.json"
