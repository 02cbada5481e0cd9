"""B30: how an answer ended is counted as the server said; a resume asks only for what is missing.

An answer that the length limit cut is kept without a supervised end of turn.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages import answering as stage
from tests.capture.answering_server import AnsweringServer
from tests.capture.answering_server import answering as answering_server
from tests.field_reports.talks_fixtures import (  # noqa: F401
    Talks,
    plain_target_fixture,
    talk,
    talks_fixture,
)

END = 3  # <|im_end|>
LIMIT = 6
QUESTIONS = [f"How many is {n}?" for n in range(10)]
CUT, EMPTY, BROKEN, REPEATED = (1, 4, 8), 5, 6, 7
WHOLE = (0, 2, 3, 9)
SET = (
    *("--engine", "sglang", "--set", "prepare.answers=target"),
    *("--set", f"prepare.answering.max_new_tokens={LIMIT}"),
    *("--set", "extract.server.device=cpu", "--set", "extract.server.tensor_parallel=1"),
)


class Stub:
    """Stands for the started server: ten prompts, told apart by their text, and what each gets."""

    def __init__(self, server: AnsweringServer, talks: Talks) -> None:
        self.server, self.talks = server, talks
        self.url, self.key, self.check = server.url, server.key, server.check
        self.healthy = False
        server.answer_of = self.answer_of  # type: ignore[method-assign]
        server.fault_of = self.fault_of  # type: ignore[method-assign]

    def number(self, ids: list[int]) -> int:
        text = self.talks.tokenizer.decode(ids)
        return next(n for n, question in enumerate(QUESTIONS) if question in text)

    def answer_of(self, ids: list[int], limit: int) -> list[int]:
        number = self.number(ids)
        if number == EMPTY:
            return [END]
        words = [200 + number, 201 + number, 202 + number]
        return [*words, *words][:limit] if number in CUT else [*words, END]

    def fault_of(self, ids: list[int]) -> str:
        faults = {} if self.healthy else {BROKEN: "500", REPEATED: "other_id"}
        return faults.get(self.number(ids), "")

    def asked(self) -> list[int]:
        return sorted({self.number(body["input_ids"]) for body in self.server.asked})


@pytest.fixture
def stub(talks: Talks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """The stage's server is the stub; everything else is the product's."""
    monkeypatch.setattr("pipeline.capture.sglang_generate._FIRST_PAUSE_SECONDS", 0.001)
    with answering_server() as server:
        one = Stub(server, talks)
        monkeypatch.setattr(stage, "make_server", lambda *_a, **_k: contextlib.nullcontext(one))
        monkeypatch.setattr(stage, "check_running", lambda *_a: {})
        monkeypatch.setattr("pipeline.stages.prepare.known_interpreter", lambda _run: {})
        yield one


def source(talks: Talks) -> Path:
    return talks.write([talk(question, "old answer") for question in QUESTIONS])


def test_cut_empty_failed_and_repeated_replies_are_counted_and_listed(talks: Talks, stub: Stub):
    done = talks.prepare(source(talks), *SET)
    assert done.status == 0, done.err
    counts = talks.counts()
    assert (counts["read"], counts["kept"], counts["cut_answers"]) == (10, 7, 3)
    assert counts["skipped"] == {"empty_answer": 1, "no_answer": 1, "repeated_id": 1}
    assert [(skip["place"], skip["reason"]) for skip in talks.skips()] == [
        ("talks.jsonl line 6", "empty_answer"),
        ("talks.jsonl line 7", "no_answer"),
        ("talks.jsonl line 8", "repeated_id"),
    ]
    assert "status 500" in talks.skips()[1]["detail"]
    assert "3 answers reached the length limit and have no supervised end" in done.out


def test_a_whole_answer_is_supervised_with_its_end_and_a_cut_one_without(talks: Talks, stub: Stub):
    assert talks.prepare(source(talks), *SET).status == 0
    kept = sorted((*CUT, *WHOLE))
    for number, (ids, mask) in zip(kept, talks.samples(), strict=True):
        supervised = [token for token, mark in zip(ids, mask, strict=True) if mark]
        words = [200 + number, 201 + number, 202 + number]
        assert supervised == ([*words, *words] if number in CUT else [*words, END])
        assert QUESTIONS[number] in talks.tokenizer.decode(ids)


def test_a_resume_asks_only_for_what_is_missing_and_repeats_no_row(
    talks: Talks, stub: Stub, monkeypatch: pytest.MonkeyPatch
):
    def stopped(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.stages.prepare.read_answers", stopped)
        assert talks.prepare(source(talks), *SET).status == 130
    assert stub.asked() == list(range(10))
    assert not (talks.output / "manifest.json").exists()
    stub.server.asked.clear()
    stub.healthy = True
    done = talks.prepare(source(talks), "--resume", *SET)
    assert done.status == 0, done.err
    assert stub.asked() == [BROKEN, REPEATED]
    assert len(stub.server.asked) == 2
    lines = (talks.output / "answers.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 10
    counts = talks.counts()
    assert (counts["read"], counts["kept"], counts["cut_answers"]) == (10, 9, 3)
    assert counts["skipped"] == {"empty_answer": 1}
    places = [json.loads(line)["id"] for line in lines]
    assert sorted(places) == sorted(f"talks.jsonl line {n + 1}" for n in range(10))
    kept = [n for n in range(10) if n != EMPTY]
    for number, (ids, _) in zip(kept, talks.samples(), strict=True):
        assert QUESTIONS[number] in talks.tokenizer.decode(ids)


def test_prompts_that_cannot_be_asked_are_counted_and_the_others_answered(talks: Talks, stub: Stub):
    records = [talk(question, "x") for question in QUESTIONS[:4]]
    records[1:1] = [talk("é" * 200, "x"), talk("half \ud83d", "x"), {"messages": []}]
    done = talks.prepare(talks.write(records), *SET)
    assert done.status == 0, done.err
    assert talks.counts()["skipped"] == {"too_long": 1, "bad_text": 1, "no_messages": 1}
    assert [skip["place"] for skip in talks.skips()] == [f"talks.jsonl line {n}" for n in (2, 3, 4)]
    assert stub.asked() == [0, 1, 2, 3]


def test_an_answer_beyond_max_length_is_cut_or_skipped_as_the_setting_says(
    talks: Talks, stub: Stub
):
    talks_of_two = talks.write([talk(question, "x") for question in QUESTIONS[:2]])
    room = 2 + len(talks.tokenizer("user\n" + QUESTIONS[0], add_special_tokens=False)["input_ids"])
    prompt = (
        room
        + 1
        + len(talks.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"])
    )
    shorter = ("--set", f"prepare.max_length={prompt + 2}", "--set", "prepare.least_kept_share=0")
    assert talks.prepare(talks_of_two, *SET, *shorter).status == 0
    assert talks.counts()["cut_to_length"] == 2
    assert [len(ids) for ids, _ in talks.samples()] == [prompt + 2] * 2
    error = talks.refused(talks_of_two, *SET, *shorter, "--set", "prepare.too_long=skip")
    assert "{'too_long': 2}" in error


def test_every_request_failing_ends_the_stage_and_keeps_nothing(talks: Talks, stub: Stub):
    stub.fault_of = lambda _ids: "500"  # type: ignore[method-assign]
    stub.server.fault_of = stub.fault_of  # type: ignore[method-assign]
    error = talks.refused(source(talks), *SET)
    assert "0 of 10 records kept, no supervised token is left; skipped: {'no_answer': 10}" in error
