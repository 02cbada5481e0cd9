import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.capture.sglang_generate import Generated, GenerationFailed
from pipeline.conversations.answers import read_answers
from pipeline.conversations.errors import ConversationError
from pipeline.conversations.normalise import Skip
from pipeline.conversations.server_answers import (
    AnswerRequest,
    Unanswered,
    plan_answers,
    write_answers,
)
from pipeline.target.random import make_random_target
from pipeline.target.tokenizer import load_tokenizer
from tests.capture.answering_server import END, AnsweringServer, answering

COUNT = 12


class CountingServer(AnsweringServer):
    """Answers by the prompt's length: some end by themselves, some are cut."""

    def answer_of(self, ids: list[int], limit: int) -> list[int]:
        ends = len(ids) % 3 != 0
        length = 2 + len(ids) % 3 if ends else limit
        return [*range(10, 10 + length - 1), END if ends else 20]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_random_target(
        folder,
        seed=3,
        hidden_size=32,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate_size=64,
        vocabulary_size=320,
    )
    return folder


@pytest.fixture
def server() -> Iterator[AnsweringServer]:
    with answering() as one:
        one.answer_of = CountingServer.answer_of.__get__(one)  # type: ignore[method-assign]
        yield one


@pytest.fixture
def request_of(target: Path, tmp_path: Path) -> AnswerRequest:
    lines = [
        {"id": f"p {n}", "messages": [{"role": "user", "content": "sea " * (n + 1)}]}
        for n in range(COUNT)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return AnswerRequest(
        folder=target,
        prompts=prompts,
        out=tmp_path / "answers.jsonl",
        max_new_tokens=7,
        dtype="float32",
        end_of_turn_ids=frozenset({END}),
    )


def write(request: AnswerRequest, server: Any) -> list[Generated]:
    """Answers what is missing; gives what was asked for and came."""
    found: list[Generated] = []
    plan = plan_answers(request, load_tokenizer(request.folder, remote_code=False))
    assert not ask(plan, server, found)
    return found


def ask(plan: Unanswered, server: Any, found: list[Generated] | None = None) -> dict[str, Skip]:
    tokenizer = load_tokenizer(plan.request.folder, remote_code=False)
    advance = [].append if found is None else found.append
    return write_answers(
        plan, server, tokenizer, concurrency=3, timeout_seconds=10.0, advance=advance
    )


def test_the_file_is_one_that_prepare_reads(
    request_of: AnswerRequest, server: AnsweringServer
) -> None:
    write(request_of, server)
    answers, counts = read_answers(request_of.out, end_of_turn_ids=frozenset({END}))
    assert [one.id for one in answers] == [f"p {n}" for n in range(COUNT)]
    assert counts.read == COUNT
    assert counts.stop > 0
    assert counts.length > 0
    assert counts.stop + counts.length == COUNT


def test_a_cut_answer_has_no_end_and_a_whole_one_has(
    request_of: AnswerRequest, server: AnsweringServer
) -> None:
    write(request_of, server)
    answers, _ = read_answers(request_of.out, end_of_turn_ids=frozenset({END}))
    for one in answers:
        assert (one.answer_ids[-1] == END) == (one.finish_reason == "stop")
        assert len(one.answer_ids) == 7 or one.finish_reason == "stop"


def test_the_server_gets_the_templates_ids_and_no_text(
    request_of: AnswerRequest, server: AnsweringServer
) -> None:
    write(request_of, server)
    answers, _ = read_answers(request_of.out, end_of_turn_ids=frozenset({END}))
    asked = {tuple(one["input_ids"]) for one in server.asked}
    assert asked == {one.prompt_ids for one in answers}
    tokenizer = load_tokenizer(request_of.folder, remote_code=False)
    assert tokenizer.decode(answers[0].prompt_ids).endswith("<|im_start|>assistant\n")


def test_answers_are_in_the_prompts_order_whichever_is_ready_first(
    request_of: AnswerRequest, server: AnsweringServer
) -> None:
    first = plan_answers(request_of, load_tokenizer(request_of.folder, remote_code=False))
    server.seconds = {first.encoded[0][0]: 0.05}
    found = write(request_of, server)
    assert [one.prompt.id for one in found] == [f"p {n}" for n in range(COUNT)]


@pytest.mark.parametrize("cut", [0, 5])
def test_a_resumed_file_is_that_of_an_uninterrupted_run(
    request_of: AnswerRequest, server: AnsweringServer, cut: int
) -> None:
    write(request_of, server)
    whole = request_of.out.read_bytes()
    lines = whole.splitlines(keepends=True)
    request_of.out.write_bytes(b"".join(lines[:4]) + lines[4][:cut])
    server.asked.clear()
    found = write(request_of, server)
    assert [one.prompt.id for one in found] == [f"p {n}" for n in range(4, COUNT)]
    assert len(server.asked) == COUNT - 4
    assert request_of.out.read_bytes() == whole


def test_a_finished_file_needs_no_server(
    request_of: AnswerRequest, server: AnsweringServer
) -> None:
    write(request_of, server)
    plan = plan_answers(request_of, load_tokenizer(request_of.folder, remote_code=False))
    assert (plan.left, plan.done) == ([], COUNT)


def refusing(request: AnswerRequest, server: AnsweringServer, refused: range) -> Unanswered:
    """A plan in which the server refuses some prompts, known by their first token."""
    plan = plan_answers(request, load_tokenizer(request.folder, remote_code=False))
    encoded = [[319, *ids] if at in refused else ids for at, ids in enumerate(plan.encoded)]
    server.faults = {319: ["400"] * len(refused)}
    return dataclasses.replace(plan, encoded=encoded)


def test_a_refused_prompt_is_told_and_asked_again_by_a_resume_that_asks_for_no_other(
    request_of: AnswerRequest, server: AnsweringServer
) -> None:
    missing = ask(refusing(request_of, server, range(6, 7)), server)
    assert [(name, skip.reason) for name, skip in missing.items()] == [("p 6", "no_answer")]
    assert "refuses prompt p 6" in missing["p 6"].detail
    answers, _ = read_answers(request_of.out, end_of_turn_ids=frozenset({END}))
    assert [one.id for one in answers] == [f"p {n}" for n in range(COUNT) if n != 6]
    assert [one.prompt.id for one in write(request_of, server)] == ["p 6"]


def test_many_prompts_in_a_row_without_an_answer_are_a_fault_of_the_server(
    request_of: AnswerRequest, server: AnsweringServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.conversations.server_answers._MOST_UNANSWERED_IN_A_ROW", 4)
    with pytest.raises(GenerationFailed, match="refuses prompt p 9"):
        ask(refusing(request_of, server, range(6, 10)), server)
    answers, _ = read_answers(request_of.out, end_of_turn_ids=frozenset({END}))
    assert [one.id for one in answers] == [f"p {n}" for n in range(6)]
    server.faults = {}
    assert len(write(request_of, server)) == COUNT - 6


def test_a_line_that_answers_no_prompt_of_the_file_or_one_twice_is_refused(
    request_of: AnswerRequest, server: AnsweringServer
) -> None:
    write(request_of, server)
    whole = request_of.out.read_bytes()
    request_of.out.write_bytes(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(ConversationError, match=r"answers\.jsonl:13: answer 'p 0'"):
        plan_answers(request_of, load_tokenizer(request_of.folder, remote_code=False))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_new_tokens": 8}, "max_new_tokens"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"end_of_turn_ids": frozenset({END, 3})}, "end_of_turn_ids"),
    ],
)
def test_a_resume_with_other_settings_is_refused(
    request_of: AnswerRequest, server: AnsweringServer, change: dict[str, Any], named: str
) -> None:
    write(request_of, server)
    with pytest.raises(ConversationError, match=named):
        plan_answers(
            dataclasses.replace(request_of, **change),
            load_tokenizer(request_of.folder, remote_code=False),
        )


def test_answers_of_the_other_engine_are_not_continued(
    request_of: AnswerRequest, server: AnsweringServer
) -> None:
    write(request_of, server)
    beside = request_of.out.with_name("answers.jsonl.begun.json")
    begun = json.loads(beside.read_text())
    del begun["engine"]
    beside.write_text(json.dumps(begun | {"batch_size": 32}))
    with pytest.raises(ConversationError, match="batch_size, engine"):
        plan_answers(request_of, load_tokenizer(request_of.folder, remote_code=False))


def test_a_prompt_without_room_for_its_answer_is_named_before_a_server_starts(
    request_of: AnswerRequest,
) -> None:
    long = dataclasses.replace(request_of, max_new_tokens=2040)
    with pytest.raises(ConversationError, match="'p 0' has"):
        plan_answers(long, load_tokenizer(request_of.folder, remote_code=False))
