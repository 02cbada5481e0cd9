"""verify: nothing that changed after the seal is missed, and what is lost is named."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.slate.errors import LockHeld
from pipeline.slate.lock import lock
from pipeline.slate.manifest import Manifest, changed_files
from pipeline.stages.plan import STAGES, run_stage
from pipeline.stages.verify import report, verify_run
from pipeline.store.index import ShardIndex
from pipeline.store.layout import ShardLayout

from .conftest import Project
from .sealing import (
    FIELDS,
    copy,
    first_index,
    flip,
    place,
    reseal,
    rewrite,
    run_of,
    sealed_files,
    truncate,
    verdicts,
)

QUICK = settings(
    max_examples=250,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def root(whole: tuple[Project, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a whole run for tests that put back what they change."""
    return copy(whole[0].root, tmp_path_factory.mktemp("verify") / "runs")


@pytest.fixture
def own(root: Path, tmp_path: Path) -> Path:
    """A copy that a test may leave damaged."""
    return copy(root, tmp_path / "runs")


@pytest.fixture(scope="module")
def other(whole: tuple[Project, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same prepared samples with states by another engine."""
    root = tmp_path_factory.mktemp("other") / "runs"
    for stage in ("target", "prepare"):
        shutil.copytree(whole[0].folder / stage, root / "tiny" / stage)
    run_stage("extract", run_of(root, "extract.engine=stand_in"), resume=False)
    return root


def test_a_whole_run_is_whole_and_each_of_its_bytes_is_read_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = 0, os.preadv

    def counted(file: int, buffers: list[memoryview], at: int) -> int:
        nonlocal read
        got = real(file, buffers, at)
        read += got
        return got

    monkeypatch.setattr(os, "preadv", counted)
    found = verdicts(root)
    assert list(found) == list(STAGES)
    assert {one.state for one in found.values()} == {"whole"}
    sealed = [
        path.stat().st_size
        for path in sealed_files(root / "tiny")
        if path.parent.parent != root / "tiny"
        or path.name not in ("manifest.json", ".cleanslate.json")
    ]
    assert sum(one.bytes for one in found.values()) == sum(sealed)
    assert read == sum(sealed)


@QUICK
@given(data=st.data())
def test_any_flipped_bit_is_found_in_its_stage_and_file(root: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sealed_files(root / "tiny")))
    size = path.stat().st_size
    # Half of the draws in the first and last bytes: headers, padding, the ends of lists.
    near = st.integers(0, min(size, 64) - 1)
    ends = near | near.map(lambda n: size - 1 - n)
    at = data.draw(ends | st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 7))
    stage = path.relative_to(root / "tiny").parts[0]
    flip(path, at, bit)
    try:
        verdict = verdicts(root, stage)[stage]
    finally:
        flip(path, at, bit)
    assert verdict.state == "damaged"
    name = path.relative_to(root / "tiny" / stage).as_posix()
    assert name in {problem.file for problem in verdict.problems}
    assert verdict.next_step


def test_any_flipped_bit_of_a_marker_is_found(root: Path) -> None:
    path = root / "tiny" / "prepare" / ".cleanslate.json"
    manifest = Manifest.read(path.parent)
    from pipeline.stages.verify import _marker_problem

    for at in range(path.stat().st_size):
        for bit in range(8):
            flip(path, at, bit)
            assert _marker_problem(path.parent, manifest), (at, bit)
            flip(path, at, bit)
    assert not _marker_problem(path.parent, manifest)


def test_a_seal_that_is_only_spelled_otherwise_is_found(own: Path) -> None:
    path = own / "tiny" / "train" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    verdict = verdicts(own)["train"]
    assert [problem.kind for problem in verdict.problems] == ["spelling"]
    assert verdict.next_step == "make repair"


def in_shard(output: Path) -> Path:
    return output / "states-00000.safetensors"


def header_padding(output: Path) -> str:
    flip(in_shard(output), ShardLayout(FIELDS, first_index(output).rows).offsets()["tap_0"] - 1)
    return "every sample's rows are right, its header is not"


def a_state(output: Path) -> str:
    index = first_index(output)
    flip(in_shard(output), place(index.entries[3], index.rows, "tap_2", 1) + 7, 4)
    return f"sample {index.entries[3].id}: its rows are not those of its digest"


def the_mask(output: Path) -> str:
    index = first_index(output)
    flip(in_shard(output), place(index.entries[2], index.rows, "supervised", 5))
    return f"sample {index.entries[2].id} supervised row 5: not as prepared"


def an_id(output: Path) -> str:
    index = first_index(output)
    flip(in_shard(output), place(index.entries[2], index.rows, "input_ids", 4))
    return f"sample {index.entries[2].id} input_ids row 4: not as prepared"


def a_cut(output: Path) -> str:
    index = first_index(output)
    truncate(in_shard(output), 3)
    return f"sample {index.entries[-1].id} supervised: is cut off"


def a_growth(output: Path) -> str:
    with in_shard(output).open("ab") as file:
        file.write(b"\0")
    return (
        f"bytes, {in_shard(output).stat().st_size - 1} were sealed; every sample's rows are right"
    )


def a_lost_row(output: Path) -> str:
    data = in_shard(output).read_bytes()
    in_shard(output).write_bytes(data[:5000] + data[5128:])
    return f"sample {first_index(output).entries[0].id}: its rows are not those of its digest"


def a_lost_shard(output: Path) -> str:
    in_shard(output).unlink()
    return f"sample {first_index(output).entries[0].id}: its shard is gone"


def swapped_shards(output: Path) -> str:
    one, two = in_shard(output), output / "states-00001.safetensors"
    one.rename(output / "x")
    two.rename(one)
    (output / "x").rename(two)
    return "states-00001.safetensors has"


def swapped_files(output: Path) -> str:
    one, two = output / "logprobs-00000.json", output / "logprobs-00001.json"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return "logprobs-00001.json has"


def a_link(output: Path) -> str:
    in_shard(output).rename(output.parent.parent / "elsewhere")
    in_shard(output).symlink_to(output.parent.parent / "elsewhere")
    return "states-00000.safetensors is a link"


def a_pipe(output: Path) -> str:
    (output / "dataset.json").unlink()
    os.mkfifo(output / "dataset.json")
    return "dataset.json is no plain file"


def a_folder(output: Path) -> str:
    (output / "dataset.json").unlink()
    (output / "dataset.json").mkdir()
    return "dataset.json is no plain file"


def another_file(output: Path) -> str:
    shutil.copy(output / "states-00000.json", output / "states-00009.json")
    return "states-00009.json was not there when the output was sealed"


def another_folder(output: Path) -> str:
    (output / "more" / "deep").mkdir(parents=True)
    return "more was not there when the output was sealed"


DAMAGES = [
    header_padding, a_state, the_mask, an_id, a_cut, a_growth, a_lost_row, a_lost_shard,
    swapped_shards, swapped_files, a_link, a_pipe, a_folder, another_file, another_folder,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_to_an_extract_is_named(own: Path, damage: Callable[[Path], str]) -> None:
    said = damage(own / "tiny" / "extract")
    verdict = verdicts(own, "target", "prepare", "extract")["extract"]
    lines = []
    for problem in verdict.problems:
        lines.append(f"{problem.file} {problem.what}")
        lines += [f"sample {bad}" for bad in problem.samples]
    assert verdict.state == "damaged"
    assert any(said in line for line in lines), lines
    wanted = (
        "move what nobody sealed" if damage in (another_file, another_folder) else "make repair"
    )
    assert verdict.next_step.startswith(wanted)


@pytest.mark.parametrize("damage", [another_file, a_link], ids=lambda damage: damage.__name__)
def test_a_stage_does_not_read_an_input_with_such_damage_either(
    own: Path, damage: Callable[[Path], str]
) -> None:
    damage(own / "tiny" / "extract")
    output = own / "tiny" / "extract"
    bad = changed_files(output, Manifest.read(output), threads=2, advance=lambda _: None)
    assert len(bad) == 1


def test_the_largest_file_is_begun_first(root: Path) -> None:
    output, begun = root / "tiny" / "train", []

    def watch(name: str) -> Callable[[memoryview], None]:
        begun.append((output / name).stat().st_size)
        return lambda _piece: None

    changed_files(output, Manifest.read(output), threads=1, advance=lambda _: None, watch=watch)
    assert begun == sorted(begun, reverse=True)
    assert len(begun) > 5


def test_files_of_another_run_are_found_also_with_their_own_index(own: Path, other: Path) -> None:
    for name in ("states-00000.safetensors", "states-00000.json"):
        shutil.copy(other / "tiny" / "extract" / name, own / "tiny" / "extract" / name)
    verdict = verdicts(own)["extract"]
    assert {problem.file for problem in verdict.problems} == {
        "states-00000.safetensors",
        "states-00000.json",
    }


def test_a_whole_output_of_another_run_breaks_the_chain(own: Path, other: Path) -> None:
    (own / "tiny" / "extract").rename(own / "kept")
    shutil.copytree(other / "tiny" / "extract", own / "tiny" / "extract")
    found = verdicts(own)
    assert found["extract"].state == "whole"
    assert [problem.kind for problem in found["train"].problems] == ["chain"]
    assert found["train"].next_step == "make train"


def test_a_seal_in_the_wrong_folder_is_found(own: Path) -> None:
    (own / "tiny" / "export").rename(own / "tiny" / "kept")
    (own / "tiny" / "evaluate").rename(own / "tiny" / "export")
    assert "is the seal of evaluate" in verdicts(own)["export"].problems[0].what


def test_a_seal_that_cannot_be_read_does_not_hide_the_other_stages(own: Path) -> None:
    flip(own / "tiny" / "extract" / "manifest.json", 300, 1)
    flip(own / "tiny" / "export" / "config.json", 3)
    found = verdicts(own)
    assert list(found) == list(STAGES)
    assert [problem.kind for problem in found["extract"].problems] == ["seal"]
    assert found["train"].state == "whole"
    assert found["export"].problems[0].file == "config.json"


def test_the_next_step_for_an_unreadable_seal_gives_the_same_digest_without_the_engine(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own / "tiny" / "extract" / "manifest.json"
    digest = Manifest.read(path.parent).digest
    path.write_bytes(path.read_bytes()[:-20])
    verdict = verdicts(own)["extract"]
    assert verdict.next_step.startswith("delete extract/manifest.json; make extract RESUME=1")
    path.unlink()
    assert run_stage("extract", run_of(own), resume=True).digest == digest


@pytest.mark.parametrize("left", [".cleanslate.json", None])
def test_a_seal_that_is_gone_is_said_and_later_stages_are_not_proven(
    own: Path, left: str | None
) -> None:
    (own / "tiny" / "extract" / "manifest.json").unlink()
    if left is None:
        (own / "tiny" / "extract" / ".cleanslate.json").unlink()
    found = verdicts(own)
    assert found["extract"].state == ("unsealed" if left else "damaged")
    assert "extract is not sealed now" in found["train"].problems[0].what


def not_a_number(data: bytearray, index: ShardIndex) -> None:
    at = place(index.entries[1], index.rows, "tap_0", 3)
    data[at + 10 : at + 12] = b"\xc0\x7f"


def infinite(data: bytearray, index: ShardIndex) -> None:
    at = place(index.entries[1], index.rows, "tap_0", 3)
    data[at + 10 : at + 12] = b"\x80\xff"


def two_zero_rows(data: bytearray, index: ShardIndex) -> None:
    at = place(index.entries[1], index.rows, "final", 0)
    data[at : at + 256] = b"\0\x80" * 128  # minus zero is zero too


def other_ids(data: bytearray, index: ShardIndex) -> None:
    data[place(index.entries[1], index.rows, "input_ids", 2)] ^= 1


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (not_a_number, "tap_0 row 3: not finite"),
        (infinite, "tap_0 row 3: not finite"),
        (two_zero_rows, "final rows 0 to 1: all zero"),
        (other_ids, "input_ids row 2: not as prepared"),
    ],
)
def test_rows_that_no_capture_gives_are_found_in_a_seal_that_fits_them(
    own: Path, edit: Callable[[bytearray, ShardIndex], None], said: str
) -> None:
    output = own / "tiny" / "extract"
    rewrite(output, 0, edit)
    verdict = verdicts(own)["extract"]
    [problem] = verdict.problems
    assert (problem.kind, problem.file) == ("rows", "states-00000.safetensors")
    assert [str(bad) for bad in problem.samples] == [f"{first_index(output).entries[1].id} {said}"]
    assert verdict.next_step == "make repair"


def test_bytes_that_changed_do_not_hide_rows_that_no_capture_gave(own: Path) -> None:
    output = own / "tiny" / "extract"
    rewrite(output, 0, two_zero_rows)
    index = first_index(output)
    flip(in_shard(output), place(index.entries[3], index.rows, "tap_2", 1))
    [problem] = verdicts(own)["extract"].problems
    assert [bad.id for bad in problem.samples] == [index.entries[1].id, index.entries[3].id]


def test_the_largest_finite_number_and_a_lone_value_in_a_row_are_no_damage(own: Path) -> None:
    def edit(data: bytearray, index: ShardIndex) -> None:
        at = place(index.entries[1], index.rows, "final", 0)
        data[at : at + 128] = b"\x7f\x7f" + b"\0" * 126

    rewrite(own / "tiny" / "extract", 0, edit)
    assert not verdicts(own, "target", "prepare", "extract")["extract"].problems


def test_counts_that_are_not_those_of_the_shards_are_found(own: Path) -> None:
    for stage in ("prepare", "extract"):
        output = own / "tiny" / stage
        counts = Manifest.read(output).counts
        reseal(output, counts={**counts, "kept": counts["kept"] + 1})
        assert "counts.kept" not in verdicts(own)[stage].problems[0].file
        kinds = {problem.kind for problem in verdicts(own)[stage].problems}
        assert "counts" in kinds


def test_samples_in_another_order_than_prepared_are_found(own: Path) -> None:
    output = own / "tiny" / "extract"
    index = first_index(output)
    one, two, *rest = index.entries
    swapped = (replace(one, id=two.id, split=two.split), replace(two, id=one.id, split=one.split))
    replace(index, entries=(*swapped, *rest)).write(output / "states-00000.json")
    reseal(output)
    verdict = verdicts(own)["extract"]
    assert {bad.id for problem in verdict.problems for bad in problem.samples} == {one.id, two.id}


def test_shards_in_another_order_than_prepared_are_found(own: Path) -> None:
    output = own / "tiny" / "extract"
    names = ("states-00000", "states-00001")
    indexes = [first_index(output, number) for number in (0, 1)]
    for name in names:
        (output / f"{name}.safetensors").rename(output / name)
    for name, index, was in zip(names, reversed(indexes), reversed(names), strict=True):
        (output / was).rename(output / f"{name}.safetensors")
        shard = f"{name}.safetensors"
        entries = tuple(replace(entry, shard=shard) for entry in index.entries)
        replace(index, shard=shard, entries=entries).write(output / f"{name}.json")
    reseal(output)
    [problem] = verdicts(own)["extract"].problems
    assert problem.what == "does not hold exactly the prepared samples, in their order"


@pytest.fixture
def failing_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Bytes of a file that cannot be read: stands in for the system's answer."""
    bad: list[tuple[int, int]] = []
    preadv, pread = os.preadv, os.pread

    def check(file: int, size: int, at: int) -> None:
        for inode, byte in bad:
            if os.fstat(file).st_ino == inode and at <= byte < at + size:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing_preadv(file: int, buffers: list[memoryview], at: int) -> int:
        check(file, sum(map(len, buffers)), at)
        return preadv(file, buffers, at)

    def failing_pread(file: int, size: int, at: int) -> bytes:
        check(file, size, at)
        return pread(file, size, at)

    monkeypatch.setattr(os, "preadv", failing_preadv)
    monkeypatch.setattr(os, "pread", failing_pread)
    return lambda path, byte: bad.append((path.stat().st_ino, byte))


def test_a_bad_block_costs_the_sample_on_it_and_is_named(
    own: Path, failing_disk: Callable[[Path, int], None]
) -> None:
    output = own / "tiny" / "extract"
    index = first_index(output)
    entry = index.entries[4]
    failing_disk(in_shard(output), place(entry, index.rows, "tap_1", 2) + 5)
    [problem] = verdicts(own)["extract"].problems
    assert problem.what == "cannot be read: Input/output error"
    last = entry.length - 1
    assert [str(bad) for bad in problem.samples] == [
        f"{entry.id} tap_1 rows 0 to {last}: cannot be read: Input/output error"
    ]


def test_a_disk_that_became_read_only_is_looked_at_all_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def read_only(path: object, flags: int, *more: int, **named: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    found = verify_run(root / "tiny", stages=tuple(STAGES), threads=2)
    assert {one.state for one in found} == {"whole"}


def test_a_run_that_is_being_worked_on_is_not_looked_at(root: Path) -> None:
    with lock(root / "tiny", purpose="train"), pytest.raises(LockHeld, match="train"):
        verify_run(root / "tiny", stages=tuple(STAGES), threads=1)


def test_a_run_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert verify_run(tmp_path / "tiny", stages=tuple(STAGES), threads=1) == []
    assert not (tmp_path / "tiny").exists()


def test_the_command_names_all_for_people_and_for_machines(own: Path) -> None:
    project = Project(own)
    output = own / "tiny" / "extract"
    index = first_index(output)
    entry = index.entries[0]
    flip(in_shard(output), place(entry, index.rows, "supervised", 2))
    folder, stages = own / "tiny", tuple(STAGES)
    found = verify_run(folder, stages=stages, threads=2)
    lines = list(report(found, folder=folder, stages=stages, as_json=False))
    at = lines.index(f"extract: DAMAGED {project.manifest('extract').digest}")
    assert lines[at + 1 : at + 4] == [
        "  states-00000.safetensors has other bytes than were sealed (same size)",
        f"    sample {entry.id} supervised row 2: not as prepared",
        "  next: make repair",
    ]
    assert lines[-1] == "in no seal, so not looked at: .lock, logs"
    done = project.run("verify", "--json")
    assert done.returncode == 1, done.stderr
    value = json.loads(done.stdout)
    assert value["whole"] is False
    assert value["not_covered"] == [".lock", "logs"]
    states = {stage["stage"]: stage["state"] for stage in value["stages"]}
    assert states.pop("extract") == "damaged"
    assert set(states.values()) == {"whole"}
    [problem] = value["stages"][2]["problems"]
    assert problem["samples"] == [
        {"id": entry.id, "what": "not as prepared", "field": "supervised", "rows": [2, 2]}
    ]
