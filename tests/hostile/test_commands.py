"""Through the front door: whatever is given, an error has its parts and a status, no traceback."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.slate.manifest import Manifest
from tests.hostile.bounded import Bounded

TALK = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "so"}]}'
# What each line is counted as.
LINES = [
    (TALK % "one", "kept"),
    (TALK % "two", "kept"),
    (TALK % "three", "kept"),
    ('{"\\ud800": 1}', "no_conversation"),
    (TALK % "\\ud83d", "bad_text"),
    (TALK % "\\ud83d\\ude00", "kept"),
    ('{"messages": [{"role": "\\ud800", "content": "a"}]}', "unknown_role"),
    ('{"messages": 1e999}', "unreadable"),
    ("[" * 50_000, "unreadable"),
    ("1" * 5000, "unreadable"),
    ('"text"', "not_a_record"),
    (json.dumps({"messages": json.loads(TALK % "x")["messages"] * 501}), "too_many_turns"),
]


def said_in_words(outcome: dict[str, Any]) -> str:
    assert (outcome["kind"], outcome.get("status")) == ("exit", 1), outcome
    said: str = outcome["said"]
    assert "\n  wanted: " in said, said
    assert "\n  next:   " in said, said
    assert "Traceback" not in said
    return said


def test_every_hostile_record_is_counted_and_no_name_reaches_the_terminal_as_it_is(
    tmp_path: Path, bounded: Bounded
) -> None:
    talks = tmp_path / "a\nb\x1b[31m.jsonl"
    talks.write_text("".join(f"{line}\n" for line, _ in LINES))
    at = ("--set", f"run.root={tmp_path / 'runs'}", "--input", str(talks))
    tiny = ("prepare", "--profile", "tiny", *at, "--set", "prepare.least_kept_share=0.1")
    said = said_in_words(bounded.command(*tiny, "--input", f"{talks}.gz"))
    assert "\\x1b[31m.jsonl.gz" in said
    assert "\x1b" not in said
    outcome = bounded.command(*tiny)
    assert outcome.get("status") == 0, outcome
    counts = Manifest.read(tmp_path / "runs" / "tiny" / "prepare").counts
    assert (counts["read"], counts["kept"]) == (12, 4)
    assert counts["skipped"] == {
        "no_conversation": 1, "bad_text": 1, "unknown_role": 1, "unreadable": 3,
        "not_a_record": 1, "too_many_turns": 1,
    }  # fmt: skip
    # Of a sealed run: what is spoilt afterwards is refused, and the rest goes on.
    target = tmp_path / "runs" / "tiny" / "target"
    for spoilt in ("[" * 100_000, "{}", '{"format": 1}', "\0" * 99):
        (target / "manifest.json").write_text(spoilt)
        assert "manifest.json" in said_in_words(bounded.command(*tiny))
        assert bounded.command("verify", "--profile", "tiny", *at[:2])["status"] == 1
    (target / "manifest.json").unlink()
    (target / ".cleanslate.json").write_text('{"project": "cleanslate"}')
    assert "begun from something else" in said_in_words(bounded.command(*tiny))
    (target / ".cleanslate.json").write_text("[[[")
    for command in (tiny, ("clean-slate", *tiny[1:5])):
        assert f"rm -r {target}" in said_in_words(bounded.command(*command))
    assert (target / "model.safetensors").is_file()


def test_a_file_name_that_is_no_utf8_is_refused(tmp_path: Path, bounded: Bounded) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    (folder / os.fsdecode(b"\xff.jsonl")).write_text(TALK % "one")
    at = ("--set", f"run.root={tmp_path / 'runs'}", "--input", str(folder))
    said = said_in_words(bounded.command("prepare", "--profile", "tiny", *at))
    assert "no UTF-8" in said


COMMANDS = {
    "a profile with a long name": ("show", "--profile", "x" * 300),
    "a profile that is a folder": ("show", "--profile", "/"),
    "a profile of a device": ("show", "--profile", "/dev/zero"),
    "a root with a zero byte": ("show", "--profile", "tiny", "--set", 'run.root="a\\0b"'),
    "an argument with a zero byte": (
        "show", "--profile", "tiny", "--set", 'extract.server.extra_arguments=["a\\0"]'),
    "a root with a long name": ("prepare", "--profile", "tiny", "--set", f"run.root={'y' * 300}"),
    "a run named elsewhere": ("show", "--profile", "tiny", "--set", "run.name=../../x"),
    "a run with a line break": ("show", "--profile", "tiny", "--set", 'run.name="a\\nb"'),
    "a key of nothing": ("show", "--profile", "tiny", "--set", ".=1"),
    "a key below a value": ("show", "--profile", "tiny", "--set", "train.epochs.x=1"),
    "a number beyond floats": ("show", "--profile", "tiny", "--set", "train.learning_rate=1e999"),
    "a number of 5000 digits": ("show", "--profile", "tiny", "--set", f"train.epochs={'1' * 5000}"),
    "a member elsewhere": (
        "show", "--profile", "smollm2", "--set", "target.source.wheel.sha256=../x"),
    "a host file that is a folder": ("preflight", "--host", "/"),
    "a host file with a long name": ("preflight", "--host", "x" * 300),
    "a GPU of 5000 digits": ("tune-nccl", "--gpus", "1" * 5000),
    "a GPU in other digits": ("tune-nccl", "--gpus", "\u0661"),
    "facts of images with a long name": (
        "target", "--profile", "tiny", "--image-facts", "x" * 300),
}  # fmt: skip


@pytest.mark.parametrize("what", COMMANDS)
def test_an_impossible_argument_is_refused_in_words(what: str, bounded: Bounded) -> None:
    said_in_words(bounded.command(*COMMANDS[what]))
