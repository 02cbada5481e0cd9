"""Damage to a run's sealed outputs, and seals made to fit it."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from pipeline.settings.load import load_settings
from pipeline.slate.manifest import Manifest, SealedFile
from pipeline.stages.plan import STAGES
from pipeline.stages.run import Run
from pipeline.stages.verify import Verdict, look, marker_bytes
from pipeline.store.index import Entry, ShardIndex
from pipeline.store.layout import ShardLayout, state_fields

FIELDS = state_fields(64, taps=3)  # of the profile tiny


def run_of(root: Path, *overrides: str) -> Run:
    """The tiny profile's run below a root, as `tests.stages.conftest.Project` has it."""
    own = (f"run.root={root}", f"extract.staging={root / 'staging'}", *overrides)
    return Run(load_settings("tiny", overrides=own).settings)


def verdicts(root: Path, *stages: str) -> dict[str, Verdict]:
    """What verify says of each stage."""
    found = look(root / "tiny", stages=stages or tuple(STAGES), threads=2)
    return {verdict.stage: verdict for verdict in found}


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flips one bit, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def copy(source: Path, target: Path) -> Path:
    """A copy of a run's root; links stay links."""
    shutil.copytree(source, target, symlinks=True)
    return target


def tree(folder: Path) -> dict[str, str]:
    """Digest by name of all that lies below a folder, but for logs and the lock."""
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "logs" not in path.parts and path.name != ".lock"
    }


def place(entry: Entry, rows: int, field: str, row: int) -> int:
    """The byte of a shard at which a row of a sample's field begins."""
    [wanted] = [one for one in FIELDS if one.name == field]
    start = ShardLayout(FIELDS, rows).offsets()[field]
    return start + (entry.offset + row) * wanted.row_bytes


def reseal(output: Path, **changed: object) -> None:
    """Writes a manifest that fits the files as they are: a seal that was wrong from the start."""
    manifest = Manifest.read(output)
    files = {
        name: SealedFile((output / name).stat().st_size, digest_of(output / name), file.volatile)
        for name, file in manifest.files.items()
    }
    replace(manifest, files=files, **changed).write(output)


def refit(root: Path) -> None:
    """Makes the chain of digests, and the markers, fit the seals as they are."""
    digests = {}
    for stage in STAGES:
        output = root / "tiny" / stage
        manifest = Manifest.read(output)
        inputs = {name: digests[name] for name in manifest.inputs}
        manifest = replace(manifest, inputs=inputs)
        manifest.write(output)
        digests[stage] = manifest.digest
        (output / ".cleanslate.json").write_bytes(marker_bytes(manifest))


def digest_of(path: Path) -> str:
    """Hex sha256 of a file."""
    return sha256(path.read_bytes()).hexdigest()


def rewrite(output: Path, number: int, edit: Callable[[bytearray, ShardIndex], None]) -> None:
    """Edits a shard's bytes and makes index and manifest fit: as if it had been captured so."""
    shard = output / f"states-{number:05d}.safetensors"
    index = ShardIndex.read(shard.with_suffix(".json"))
    data = bytearray(shard.read_bytes())
    edit(data, index)
    shard.write_bytes(data)
    entries = tuple(
        replace(entry, digest=row_digest(data, index, entry)) for entry in index.entries
    )
    replace(index, sha256=digest_of(shard), entries=entries).write(shard.with_suffix(".json"))
    reseal(output)


def row_digest(data: bytes | bytearray, index: ShardIndex, entry: Entry) -> str:
    """A sample's digest, by the words of `sample_digest` but from the file's bytes."""
    digest = sha256()
    for field in FIELDS:
        shape = [entry.length] if field.width is None else [entry.length, field.width]
        digest.update(f"{field.name} {field.dtype} {shape}\n".encode())
        start = place(entry, index.rows, field.name, 0)
        digest.update(data[start : start + entry.length * field.row_bytes])
    return digest.hexdigest()


def first_index(output: Path, number: int = 0) -> ShardIndex:
    """The index of a shard."""
    return ShardIndex.read(output / f"states-{number:05d}.json")


def sealed_files(folder: Path) -> list[Path]:
    """Every file of every output of a run, seals and markers too."""
    return [
        path for stage in STAGES for path in sorted((folder / stage).rglob("*")) if path.is_file()
    ]


def truncate(path: Path, by: int) -> None:
    """Cuts bytes off a file's end."""
    os.truncate(path, path.stat().st_size - by)
