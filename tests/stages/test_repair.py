"""repair: exactly what is lost is captured again, by one start, and no seal lies on the way."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.faults import Fault
from pipeline.slate.errors import LockHeld
from pipeline.slate.lock import lock
from pipeline.slate.manifest import Manifest
from pipeline.slate.stage import StageStopped, Workspace
from pipeline.stages.errors import StageError
from pipeline.stages.extract import ExtractStage
from pipeline.stages.repair import repair_run
from pipeline.store.index import ShardIndex

from .conftest import ROOT, Project, good
from .sealing import (
    copy,
    first_index,
    flip,
    place,
    refit,
    reseal,
    rewrite,
    run_of,
    tree,
    truncate,
    verdicts,
)

LEFTOVER = ".repair.partial"


@pytest.fixture
def own(whole: tuple[Project, str], tmp_path: Path) -> Path:
    """A copy of a whole run."""
    return copy(whole[0].root, tmp_path / "runs")


@pytest.fixture
def output(own: Path) -> Path:
    return own / "tiny" / "extract"


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[list[list[str]]]:
    """What each start of the engine was given: ids by shard."""
    starts: list[list[list[str]]] = []
    real = ExtractStage.capture

    def watched(self: ExtractStage, workspace: object, shards: list, **more: object) -> None:
        starts.append([[entry.id for entry in shard] for shard in shards])
        real(self, workspace, shards, **more)

    monkeypatch.setattr(ExtractStage, "capture", watched)
    return starts


def lose(output: Path, number: int, entry: int, field: str = "tap_1") -> str:
    """Damages one sample's rows; gives its id."""
    index = first_index(output, number)
    one = index.entries[entry]
    flip(output / index.shard, place(one, index.rows, field, 1) + 1, 2)
    return one.id


def states(root: Path) -> dict[str, str]:
    return {stage: verdict.state for stage, verdict in verdicts(root).items()}


def test_a_whole_run_has_nothing_to_repair(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(own)
    assert repair_run(run_of(own))
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "repair: nothing to repair, all that is sealed is whole"
    assert tree(own) == before


def test_damage_of_every_kind_is_repaired_by_one_start_to_the_same_digest(own: Path) -> None:
    project, output = Project(own), own / "tiny" / "extract"
    whole, digest = tree(own), Manifest.read(output).digest
    bad = lose(output, 0, 2)
    gone = first_index(output, 1)
    (output / gone.shard).unlink()
    (output / "dataset.json").unlink()
    flip(output / "states-00001.json", 50)
    truncate(own / "tiny" / "train" / ".cleanslate.json", 5)
    (output / "states-00001.json").write_bytes((output / "states-00001.json").read_bytes())
    flip(output / "states-00001.json", 50)
    said = good(project.run("repair"))
    lost = [bad, *(entry.id for entry in gone.entries)]
    assert f"repair: {len(lost)} samples in 2 shards are captured again" in said
    assert f"digest {digest} as before, what was made from it stays valid" in said
    after = tree(own)
    changed = {name for name in whole if whole[name] != after[name]}
    assert changed <= {
        "tiny/extract/manifest.json",  # it tells of the repair
        "tiny/extract/logprobs-00000.json",
        "tiny/extract/logprobs-00001.json",
    }
    assert set(after) == set(whole)
    [record] = Manifest.read(output).provenance["repairs"]
    assert record["samples"] == {"states-00000": [bad], "states-00001": sorted(lost[1:])}
    assert record["digest_before"] == digest
    assert set(states(own).values()) == {"whole"}


def test_only_the_batches_of_the_lost_samples_run_again(
    own: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, ran = lose(output, 0, 4), []

    def stop(_self: ExtractStage, _workspace: object, shards: list, **_more: object) -> None:
        ran.extend(entry.id for shard in shards for entry in shard)
        raise StageStopped(15)

    monkeypatch.setattr(ExtractStage, "capture", stop)
    with pytest.raises(StageStopped):
        repair_run(run_of(own))
    # By hand: batches of 1024 padded tokens, the longest samples first.
    lengths = {entry.id: entry.length for entry in first_index(output).entries}
    order = sorted(lengths, key=lambda name: (-lengths[name], name))
    batches: list[list[str]] = []
    while order:
        size = max(1, 1024 // lengths[order[0]])
        batches.append(order[:size])
        order = order[size:]
    [wanted] = [batch for batch in batches if bad in batch]
    assert sorted(ran) == sorted(wanted)
    assert len(ran) < len(lengths)


def rebuilt_index(output: Path) -> None:
    (output / "states-00000.json").unlink()


def cut_index(output: Path) -> None:
    truncate(output / "states-00001.json", 40)


def no_dataset(output: Path) -> None:
    flip(output / "dataset.json", 30, 1)


def no_marker(output: Path) -> None:
    (output / ".cleanslate.json").unlink()


def respelled(output: Path) -> None:
    value = json.loads((output / "manifest.json").read_text())
    (output / "manifest.json").write_text(json.dumps(value, sort_keys=True))


def header(output: Path) -> None:
    flip(output / "states-00000.safetensors", 2000)


def grown(output: Path) -> None:
    with (output / "states-00000.safetensors").open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    "damage", [rebuilt_index, cut_index, no_dataset, no_marker, respelled, header, grown],
    ids=lambda damage: damage.__name__,
)  # fmt: skip
def test_what_is_left_tells_is_written_again_without_the_engine(
    own: Path,
    output: Path,
    captured: list[list[list[str]]],
    damage: Callable[[Path], None],
) -> None:
    whole = tree(own)
    damage(output)
    assert tree(own) != whole
    assert repair_run(run_of(own))
    assert not captured
    after = tree(own)
    assert {**after, "tiny/extract/manifest.json": ""} == {
        **whole,
        "tiny/extract/manifest.json": "",
    }
    assert set(states(own).values()) == {"whole"}


def test_a_shard_without_its_index_is_captured_as_a_whole_and_lost_measurements_are_made_again(
    own: Path, output: Path, captured: list[list[list[str]]]
) -> None:
    digest, lost = Manifest.read(output).digest, first_index(output, 1)
    names = ("states-00000.safetensors", "states-00000.json")
    before = {name: (output / name).stat().st_mtime_ns for name in names}
    lose(output, 1, 0)
    (output / "states-00001.json").unlink()
    wanted = set(json.loads((output / "logprobs-00000.json").read_text()))
    (output / "logprobs-00000.json").write_bytes(b"")
    assert repair_run(run_of(own))
    [[first, second]] = captured
    assert wanted
    assert wanted <= set(first)
    assert second == [entry.id for entry in lost.entries]
    assert wanted <= set(json.loads((output / "logprobs-00000.json").read_text()))
    assert {name: (output / name).stat().st_mtime_ns for name in names} == before
    assert Manifest.read(output).digest == digest
    assert set(states(own).values()) == {"whole"}


def other_bits(output: Path, number: int, entry: int) -> None:
    """The seal of a capture whose last bits were others, as a GPU may give in another batch."""

    def edit(data: bytearray, index: ShardIndex) -> None:
        data[place(index.entries[entry], index.rows, "tap_0", 0)] ^= 1

    rewrite(output, number, edit)


def zero_row(output: Path, number: int, entry: int) -> None:
    """The seal of a capture that did not look at its rows."""

    def edit(data: bytearray, index: ShardIndex) -> None:
        at = place(index.entries[entry], index.rows, "final", 0)
        data[at : at + 128] = bytes(128)

    rewrite(output, number, edit)


def test_other_bits_than_the_sealed_ones_give_a_new_digest_and_training_must_run_again(
    own: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = (output / "states-00000.safetensors").read_bytes()
    other_bits(output, 0, 2)
    zero_row(output, 0, 1)
    refit(own)
    before = Manifest.read(output).digest
    bad = [first_index(output).entries[1].id, lose(output, 0, 2)]
    assert repair_run(run_of(own))
    said = capsys.readouterr().out
    assert "extract has another digest now" in said
    assert "next: make train" in said
    assert (output / "states-00000.safetensors").read_bytes() == right
    manifest = Manifest.read(output)
    assert manifest.digest != before
    assert manifest.provenance["repairs"][0]["digest_before"] == before
    assert manifest.provenance["repairs"][0]["samples"] == {"states-00000": bad}
    found = verdicts(own)
    assert found["extract"].state == "whole"
    assert [problem.kind for problem in found["train"].problems] == ["chain"]
    assert found["train"].next_step == "make train"


def test_a_repair_killed_at_any_rename_leaves_no_lie_and_goes_on_without_the_engine(
    own: Path, output: Path, tmp_path: Path
) -> None:
    digest = Manifest.read(output).digest
    other_bits(output, 0, 2)
    lose(output, 0, 2)
    (output / "states-00001.safetensors").unlink()
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.stages.killed_repairs", own, tmp_path / "scratch"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    *moments, last = told
    assert last == {"moments": len(moments), "status": 0}
    assert len(moments) >= 9  # two shards, two indexes, their copies, two records, the manifest
    for moment in moments:
        assert moment == {"before": "damaged", "after": "whole", "digest": digest, "left": []}


def refusal(own: Path, *overrides: str) -> StageError:
    before = tree(own)
    with pytest.raises(StageError) as refused:
        repair_run(run_of(own, *overrides))
    assert tree(own) == before
    return refused.value


def test_an_adopted_output_is_refused(own: Path, output: Path) -> None:
    settings = {**Manifest.read(output).settings, "engine": "adopted"}
    reseal(output, settings=settings)
    refit(own)
    (output / "dataset.json").unlink()  # needs no engine
    assert repair_run(run_of(own))
    lose(output, 0, 0)
    error = refusal(own)
    assert "adopted" in error.found
    assert "make adopt" in error.next_step


def test_other_settings_than_those_of_the_capture_are_refused(own: Path, output: Path) -> None:
    lose(output, 0, 0)
    error = refusal(own, "extract.batch_tokens=512")
    assert "settings.batch_tokens: found 1024, wanted 512" in error.found


def test_what_nobody_sealed_is_not_deleted(own: Path, output: Path) -> None:
    lose(output, 0, 0)
    (output / "states-00007.json").write_text("mine")
    assert "states-00007.json" in refusal(own).next_step


def test_a_damaged_input_is_to_be_made_first(own: Path, output: Path) -> None:
    lose(output, 0, 0)
    flip(own / "tiny" / "prepare" / "samples-00000.safetensors", 5000)
    assert refusal(own).next_step.startswith("make prepare")


def test_an_unreadable_seal_is_refused_with_what_verify_says(own: Path, output: Path) -> None:
    flip(output / "manifest.json", 100)
    assert "RESUME=1" in refusal(own).next_step


def test_a_staging_folder_without_room_is_refused_before_the_engine_starts(
    own: Path, output: Path
) -> None:
    lose(output, 0, 0)
    before = tree(own)
    with pytest.raises(StageError, match="staging quota"):
        repair_run(run_of(own, f"extract.staging_quota_bytes={1 << 60}"))
    assert {name: one for name, one in tree(own).items() if LEFTOVER not in name} == before


def test_damage_of_another_stage_is_left_and_said(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(own / "tiny" / "train" / "result.json", 5)
    assert not repair_run(run_of(own))
    assert "repair: train stays damaged; next: make train" in capsys.readouterr().out


def test_a_run_that_is_being_worked_on_is_not_repaired(own: Path) -> None:
    with lock(own / "tiny", purpose="train"), pytest.raises(LockHeld, match="train"):
        repair_run(run_of(own))


def test_a_sample_that_the_engine_does_not_give_again_leaves_all_as_it_was(
    own: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(output, 0, 3)
    sealed = {name: one for name, one in tree(own).items() if LEFTOVER not in name}

    def nothing(self: ExtractStage, workspace: object, shards: list, **_more: object) -> None:
        skipped = tuple((entry.id, "refused") for entry in shards[0])
        replace(first_index(output), rows=0, entries=(), sha256="", skipped=skipped).write(
            workspace.output / "states-00000.json"
        )

    monkeypatch.setattr(ExtractStage, "capture", nothing)
    with pytest.raises(StageError, match="could not be captured again: refused"):
        repair_run(run_of(own))
    assert {name: one for name, one in tree(own).items() if LEFTOVER not in name} == sealed
    # It is not taken for captured by the next repair.
    assert not (output / LEFTOVER / "states-00000.json").exists()
    assert verdicts(own)["extract"].next_step == "make repair"


def test_states_that_do_not_give_the_engine_s_log_probabilities_are_not_put_in_place(
    own: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("states-00000.safetensors", "states-00000.json")
    right = {name: (output / name).read_bytes() for name in names}
    bad = lose(output, 0, 3)
    sealed = {name: one for name, one in tree(own).items() if LEFTOVER not in name}

    def capture(_self: ExtractStage, workspace: Workspace, _shards: list, **_more: object) -> None:
        for name, data in right.items():
            (workspace.output / name).write_bytes(data)
        (workspace.output / "logprobs-00000.json").write_text(json.dumps({bad: 0.26}))

    monkeypatch.setattr(ExtractStage, "capture", capture)
    with pytest.raises(Fault, match=f"sample {bad}.*0.2600 nats"):
        repair_run(run_of(own, "extract.logprob_tolerance=0.25"))
    assert {name: one for name, one in tree(own).items() if LEFTOVER not in name} == sealed
    assert repair_run(run_of(own, "extract.logprob_tolerance=0.27"))
    assert set(states(own).values()) == {"whole"}
