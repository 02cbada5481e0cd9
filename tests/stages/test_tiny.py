"""The public commands on the tiny profile: real processes, files, kills."""

import gzip
import json
import re
import shutil
import time
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from pipeline.slate.files import read_json
from pipeline.store.layout import ShardLayout, state_fields
from pipeline.store.reader import StateDataset
from tests.processes import below

from .conftest import Project, good, refused

TALK = {
    "messages": [
        {"role": "user", "content": "What is the capital of Peru?"},
        {"role": "assistant", "content": "Lima is the capital of Peru."},
    ]
}


def other_talk(number: int) -> dict[str, object]:
    return {
        "conversations": [
            {"from": "human", "value": f"How much is {number} and one?"},
            {"from": "gpt", "value": f"It is {number + 1}."},
        ]
    }


def test_all_stages_run_and_say_what_they_found(whole: tuple[Project, str]) -> None:
    project, said = whole
    for stage in ("target", "prepare", "extract", "train", "export", "evaluate", "report"):
        assert project.sealed(stage)
        assert f"{stage} is absent: running it" in said or stage == "report"
    assert re.search(r"measured acceptance length \d\.\d+", said)
    [(same, all_prompts)] = re.findall(r"identical outputs on (\d+) of (\d+) prompts", said)
    assert same == all_prompts
    assert "log-probabilities of 4 samples agree within" in said


def test_counts_add_up_at_every_border(whole: tuple[Project, str]) -> None:
    project, _ = whole
    prepared, extracted = project.manifest("prepare").counts, project.manifest("extract").counts
    assert prepared["read"] == 38
    assert prepared["read"] == prepared["kept"] + sum(prepared["skipped"].values())
    assert prepared["kept"] == extracted["read"] == extracted["kept"]
    assert extracted["rows"] == sum(split["tokens"] for split in prepared["splits"].values())


def test_a_manifest_tells_versions_environment_and_the_greatest_difference(
    whole: tuple[Project, str],
) -> None:
    provenance = whole[0].manifest("extract").provenance
    assert provenance["environment"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert provenance["versions"]["torch"]
    assert 0 <= provenance["measured"]["logprob_greatest_difference_nats"] < 0.25


def test_extracting_again_gives_the_same_dataset_digest(project: Project) -> None:
    before = project.manifest("extract").digest
    good(project.run("extract"))
    assert project.manifest("extract").digest == before


SMALL_SHARDS = ("--set", "extract.shard_bytes=65536", "--set", "extract.batch_tokens=64")


def losses(project: Project) -> list[float]:
    lines = (project.folder / "train" / "metrics.jsonl").read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]


def test_several_ranks_learn_the_same(project: Project, tmp_path: Path) -> None:
    shutil.copytree(project.root, tmp_path / "one")
    one = Project(tmp_path / "one")
    settings = ("--set", "train.tokens_per_pack=256", "--set", "train.tokens_per_step=1024")
    good(one.run("train", *settings))
    good(project.run("train", *settings, "--set", "train.ranks=2"))
    assert losses(project) == pytest.approx(losses(one), rel=1e-4)


def shard_of(project: Project) -> tuple[Path, ShardLayout]:
    dataset = StateDataset.open(project.folder / "extract")
    index = dataset.indexes[0]
    fields = state_fields(dataset.hidden_size, taps=3)
    return project.folder / "extract" / index.shard, ShardLayout(fields, index.rows)


def delete_a_row(project: Project) -> None:
    path, _ = shard_of(project)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + data[len(data) // 2 + 128 :])


def swap_two_rows(project: Project) -> None:
    path, layout = shard_of(project)
    data, start = bytearray(path.read_bytes()), layout.offsets()["tap_1"]
    one, two = slice(start, start + 128), slice(start + 128, start + 256)
    data[one], data[two] = data[two], data[one]
    path.write_bytes(data)


def flip_a_bit(project: Project) -> None:
    path, layout = shard_of(project)
    data = bytearray(path.read_bytes())
    data[layout.offsets()["final"] + 5] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [delete_a_row, swap_two_rows, flip_a_bit])
def test_damaged_states_are_found_and_named_before_training_uses_them(
    project: Project, damage
) -> None:
    damage(project)
    before = project.manifest("train").digest
    assert "states-00000.safetensors" in refused(project.run("train"))
    assert project.manifest("train").digest == before
    verified = project.run("verify")
    assert verified.returncode == 1
    assert "extract: DAMAGED" in verified.stdout
    if damage is not delete_a_row:
        assert re.search(r"sample s-\d{7}: its rows are not those", verified.stdout)


def test_a_cut_checkpoint_is_found_and_named_before_export_uses_it(project: Project) -> None:
    [path] = sorted((project.folder / "train" / "checkpoints").glob("step-00000008/model*"))
    path.write_bytes(path.read_bytes()[:-8])
    error = refused(project.run("export"))
    assert "step-00000008/model.safetensors" in error


def test_verify_finds_a_whole_run_whole(whole: tuple[Project, str]) -> None:
    said = good(whole[0].run("verify"))
    assert said.count("whole") == 7
    assert "DAMAGED" not in said


def test_other_settings_than_the_sealed_ones_stop_with_what_differs(project: Project) -> None:
    error = refused(project.run("train", "--set", "extract.taps=[0,2,4]"))
    assert "settings.taps: found [1,3,4], wanted [0,2,4]" in error
    assert "make extract" in error
    assert project.sealed("extract")


def test_taps_beyond_the_targets_depth_are_refused_before_the_wipe(project: Project) -> None:
    error = refused(project.run("extract", "--set", "extract.taps=[1,3,6]"))
    assert "layer 6" in error
    assert "layers 0 to 5" in error
    assert project.sealed("extract")


def write_jsonl(path: Path, records: list[dict[str, object]], end: bytes = b"\n") -> Path:
    data = end.join(json.dumps(record).encode() for record in records) + end
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def prepared(project: Project, path: Path, *more: str) -> dict[str, object]:
    good(project.run("prepare", "--input", str(path), *more))
    return dict(project.manifest("prepare").counts)


def test_a_users_file_is_read_in_every_format_to_the_same_samples(
    project: Project, tmp_path: Path
) -> None:
    records = [TALK, *(other_talk(number) for number in range(6))]
    columns = {
        key: [record.get(key) for record in records] for key in ("messages", "conversations")
    }
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")
    (tmp_path / "t.json").write_text(json.dumps(records))
    files = [
        write_jsonl(tmp_path / "t.jsonl", records),
        write_jsonl(tmp_path / "t.jsonl.gz", records),
        write_jsonl(tmp_path / "crlf.jsonl", records, b"\r\n"),
        tmp_path / "t.json",
        tmp_path / "t.parquet",
    ]
    shards = []
    for path in files:
        counts = prepared(project, path)
        assert (counts["read"], counts["kept"]) == (7, 7)
        shards.append((project.folder / "prepare" / "samples-00000.safetensors").read_bytes())
    assert len(set(shards)) == 1


def test_each_skipped_record_is_listed_with_place_and_reason(
    project: Project, tmp_path: Path
) -> None:
    bad: list[dict[str, object]] = [
        {"messages": []},
        {"messages": [{"role": "user", "content": "only asked"}]},
        {"text": "no conversation"},
    ]
    path = write_jsonl(tmp_path / "mixed.jsonl", [*bad, TALK, TALK, *map(other_talk, range(5))])
    counts = prepared(project, path)
    assert counts["read"] == 10
    assert counts["kept"] == 6
    assert counts["skipped"] == {
        "no_messages": 1,
        "no_assistant_turn": 1,
        "no_conversation": 1,
        "duplicate": 1,
    }
    lines = (project.folder / "prepare" / "skipped.jsonl").read_text().splitlines()
    places = [json.loads(line)["place"] for line in lines]
    assert places[:3] == [f"mixed.jsonl line {number}" for number in (1, 2, 3)]


def test_a_file_from_which_nothing_can_be_kept_fails_with_the_reasons(
    project: Project, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [{"messages": []}] * 4)
    error = refused(project.run("prepare", "--input", str(path)))
    assert "0 of 4 records kept" in error
    assert "'no_messages': 4" in error


def test_too_few_kept_records_fail(project: Project, tmp_path: Path) -> None:
    records = [*([{"messages": []}] * 9), TALK, other_talk(1)]
    path = write_jsonl(tmp_path / "bad.jsonl", records)
    error = refused(project.run("prepare", "--input", str(path)))
    assert "2 of 11 records kept" in error


def test_strict_stops_at_the_first_bad_record(project: Project, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [TALK, {"messages": []}, other_talk(1)])
    error = refused(project.run("prepare", "--input", str(path), "--set", "prepare.strict=true"))
    assert "bad.jsonl line 2: no_messages" in error


@pytest.mark.parametrize("name", ["absent.jsonl", "notes.txt", "cut.jsonl.gz"])
def test_an_input_that_cannot_be_read_is_refused_before_the_wipe(
    project: Project, tmp_path: Path, name: str
) -> None:
    if name == "notes.txt":
        (tmp_path / name).write_text("hello")
    if name == "cut.jsonl.gz":
        (tmp_path / name).write_bytes(gzip.compress(json.dumps(TALK).encode())[:20])
    before = project.manifest("prepare").digest
    assert name in refused(project.run("prepare", "--input", str(tmp_path / name)))
    assert project.manifest("prepare").digest == before


def test_answers_can_be_written_by_the_target_for_a_users_file(
    project: Project, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [TALK, *map(other_talk, range(4))])
    counts = prepared(project, path, "--answers", "target")
    assert counts["kept"] == 5
    lines = (project.folder / "prepare" / "answers.jsonl").read_text().splitlines()
    asked = json.loads(lines[0])["messages"][0]["content"]
    assert len(lines) == 5
    assert asked.startswith(("What is", "How much"))


def test_clean_slate_wipes_what_is_owned_and_only_that(project: Project) -> None:
    (project.folder / "notes.txt").write_text("mine")
    (project.folder / "mine").mkdir()
    (project.folder / "mine" / "thesis.tex").write_text("years")
    good(project.run("clean-slate"))
    left = {path.name for path in project.folder.iterdir()}
    assert left == {"notes.txt", "mine", "logs", ".lock"}
    assert (project.folder / "mine" / "thesis.tex").read_text() == "years"


def test_show_prints_values_with_their_origin(whole: tuple[Project, str]) -> None:
    said = good(whole[0].run("show", "--set", "train.epochs=7"))
    assert "train.epochs = 7   [override]" in said
    assert "train.ttt_steps = 3   [profile tiny.yaml]" in said
    assert "train.seed = 0   [default]" in said


def test_the_report_is_one_page_with_pictures(whole: tuple[Project, str]) -> None:
    folder = whole[0].folder / "report"
    page = (folder / "report.html").read_text()
    assert "supervised" in page
    assert not re.search(r"<(script|link|img|iframe)\b[^>]{0,200}\b(src|href)=", page)
    assert {path.name for path in folder.glob("*.png")} == {
        "records.png",
        "loss.png",
        "accuracy.png",
        "acceptance.png",
    }


def test_the_engine_stand_in_goes_through_the_same_stage(project: Project) -> None:
    good(project.run("extract", "--set", "extract.engine=stand_in"))
    assert project.manifest("extract").settings["engine"] == "stand_in"


def test_an_engine_process_that_is_killed_ends_the_stage_with_its_name(project: Project) -> None:
    process = project.start("extract", *SMALL_SHARDS)
    deadline = time.monotonic() + 60
    victim = None
    while victim is None:
        assert time.monotonic() < deadline
        victim = next(iter(below(process.pid, "pipeline.capture.worker")), None)
        time.sleep(0.01)
    victim.kill()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "pipeline.capture.worker" in error
    assert "SIGKILL" in error
    assert not project.sealed("extract")
    assert read_json(project.folder / "extract" / ".cleanslate.json")["stage"] == "extract"
