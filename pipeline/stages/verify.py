"""verify: re-reads everything that is sealed and follows the chain of digests."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.slate.lock import lock
from pipeline.slate.manifest import Manifest, changed_files
from pipeline.slate.progress import Progress
from pipeline.slate.wipe import MANIFEST
from pipeline.store.errors import ShardDamaged
from pipeline.store.index import ShardIndex
from pipeline.store.layout import SAMPLE_FIELDS, state_fields
from pipeline.store.reader import DatasetFacts, check_shard


@dataclass(frozen=True)
class Verdict:
    """One stage's output: whole, or what is wrong with it, one sentence each."""

    stage: str
    digest: str
    problems: tuple[str, ...]


def verify_run(folder: Path, *, stages: list[str], threads: int) -> list[Verdict]:
    """Looks at every sealed output of a run: each byte, and that inputs are those it was made from.

    Faults of a manifest that cannot be read at all are raised.
    """
    verdicts: list[Verdict] = []
    digests: dict[str, str] = {}
    with lock(folder, purpose="verify"):
        for stage in stages:
            output = folder / stage
            if not (output / MANIFEST).is_file():
                continue
            manifest = Manifest.read(output)
            digests[stage] = manifest.digest
            problems = [
                f"was made from another {name} (digest {digest[:12]}, present "
                f"{digests.get(name, 'none')[:12]})"
                for name, digest in manifest.inputs.items()
                if digests.get(name) != digest
            ]
            total = sum(file.bytes for file in manifest.files.values())
            with Progress(f"verify {stage}", total=total, unit="bytes") as progress:
                bad = changed_files(output, manifest, threads=threads, advance=progress.advance)
            problems += [_explain(output, name, what) for name, what in bad]
            verdicts.append(Verdict(stage, manifest.digest, tuple(problems)))
    return verdicts


def _explain(output: Path, name: str, what: str) -> str:
    """Names the samples of a damaged shard where its index still tells them."""
    sentence = f"{output / name} {what}"
    shard = output / name
    index_path = shard.with_suffix(".json")
    if shard.suffix != ".safetensors" or not index_path.is_file():
        return sentence
    try:
        if name.startswith("states-"):
            facts = DatasetFacts.read(output)
            fields = state_fields(facts.hidden_size, taps=len(facts.taps))
        else:
            fields = SAMPLE_FIELDS
        check_shard(output, ShardIndex.read(index_path), fields=fields)
    except ShardDamaged as damaged:
        return f"{sentence}: {damaged.found}"
    return sentence
