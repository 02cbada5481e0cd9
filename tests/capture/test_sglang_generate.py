import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from pipeline.capture.sglang_generate import (
    GenerationFailed,
    Limits,
    Prompt,
    generate,
)
from tests.capture.answering_server import END, AnsweringServer, answering

LIMITS = Limits(max_new_tokens=10, end_ids=frozenset({END}), concurrency=4, timeout_seconds=5.0)


@pytest.fixture
def server() -> Iterator[AnsweringServer]:
    with answering() as one:
        yield one


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p-{n}", (n, 50)) for n in range(count)]


def test_answers_come_in_the_prompts_order_whichever_is_ready_first(
    server: AnsweringServer,
) -> None:
    server.seconds = {0: 0.3, 1: 0.1}
    found = list(generate(server, prompts(6), limits=LIMITS))
    assert [one.prompt.id for one in found] == [f"p-{n}" for n in range(6)]
    assert {one.output_ids for one in found} == {tuple(range(51, 61))}
    assert {one.finish_reason for one in found} == {"length"}


def test_an_answer_keeps_its_end_of_turn_and_is_whole(server: AnsweringServer) -> None:
    (found,) = generate(server, [Prompt("p", (1, 97))], limits=LIMITS)
    assert (found.output_ids, found.finish_reason) == ((98, 99, END), "stop")


def test_an_end_of_turn_at_the_limit_is_an_end(server: AnsweringServer) -> None:
    (found,) = generate(server, [Prompt("p", (1, 90))], limits=LIMITS)
    assert (len(found.output_ids), found.finish_reason) == (10, "stop")


def test_it_asks_greedily_for_its_own_ends_and_limit(server: AnsweringServer) -> None:
    list(generate(server, prompts(1), limits=LIMITS))
    assert server.asked[0]["sampling_params"] == {
        "temperature": 0.0,
        "max_new_tokens": 10,
        "stop_token_ids": [END],
    }
    assert server.asked[0]["input_ids"] == [0, 50]
    assert "text" not in server.asked[0]


def test_no_more_requests_than_allowed_are_in_flight(server: AnsweringServer) -> None:
    server.together = threading.Barrier(4)  # a reply waits for three others
    server.seconds = dict.fromkeys(range(12), 0.05)
    assert len(list(generate(server, prompts(12), limits=LIMITS))) == 12
    assert server.most_busy == 4


def test_prompts_are_read_as_they_are_needed(server: AnsweringServer) -> None:
    read = 0

    def endless() -> Iterator[Prompt]:
        nonlocal read
        while True:
            read += 1
            assert read <= 50  # without a bound it would end with the machine's memory
            yield Prompt(f"p-{read}", (read, 50))

    limits = dataclasses.replace(LIMITS, concurrency=1)
    with closing(generate(server, endless(), limits=limits)) as answers:
        for _ in range(3):
            next(answers)
    assert read <= 12


@pytest.mark.parametrize("fault", ["drop", "500", "503", "429", "abort", "not_json", "empty"])
def test_a_lost_reply_is_asked_for_again_under_another_name(
    server: AnsweringServer, fault: str
) -> None:
    server.faults = {1: [fault]}
    found = list(generate(server, prompts(3), limits=LIMITS))
    assert [one.prompt.id for one in found] == ["p-0", "p-1", "p-2"]
    assert [one.tries for one in found] == [1, 2, 1]
    names = [one["rid"] for one in server.asked]
    assert len(set(names)) == len(names) == 4


def test_a_prompt_that_never_gets_an_answer_is_named(server: AnsweringServer) -> None:
    server.faults = {1: ["500"] * 9}
    with pytest.raises(GenerationFailed, match=r"p-1: no answer in 4 tries.*status 500"):
        list(generate(server, prompts(3), limits=LIMITS))


def test_a_refused_prompt_is_not_asked_again(server: AnsweringServer) -> None:
    server.faults = {1: ["400"]}
    with pytest.raises(GenerationFailed, match="refuses prompt p-1 of 2 tokens: status 400"):
        list(generate(server, prompts(3), limits=LIMITS))
    assert server.tries[1] == 1


def test_a_server_that_died_says_so_itself(server: AnsweringServer) -> None:
    server.faults = {0: ["die"]}
    with pytest.raises(RuntimeError, match="it died"):
        list(generate(server, prompts(1), limits=LIMITS))
    assert server.tries[0] == 1


def test_a_reply_that_takes_too_long_is_asked_for_again(server: AnsweringServer) -> None:
    server.seconds = {0: 20.0}
    limits = dataclasses.replace(LIMITS, timeout_seconds=0.2)
    with pytest.raises(GenerationFailed, match=r"p-0.*timed out"):
        list(generate(server, prompts(1), limits=limits))
    assert server.tries[0] == 4


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("other_stop", "stopped by 7"),
        ("early_end", "an end of turn at 0 of 10"),
        ("short", "9 ids, 10 counted"),
        ("cut_early", "cut after 1 tokens"),
        ("other_prompt", "a prompt of 2, 3 counted"),
    ],
)
def test_a_reply_that_contradicts_itself_is_refused(
    server: AnsweringServer, fault: str, said: str
) -> None:
    server.faults = {0: [fault] * 4}
    with pytest.raises(GenerationFailed, match=said):
        list(generate(server, prompts(1), limits=LIMITS))


def test_breaking_off_does_not_wait_for_replies_in_flight(server: AnsweringServer) -> None:
    server.seconds = {1: 20.0, 2: 20.0}
    started = time.monotonic()
    with closing(generate(server, prompts(40), limits=LIMITS)) as answers:
        assert next(answers).prompt.id == "p-0"
    assert time.monotonic() - started < 15
    assert max(server.tries.values()) == 1


def test_a_wrong_key_is_a_refusal(server: AnsweringServer) -> None:
    other = AnsweringServer()
    other.url, other.key = server.url, "another"
    with pytest.raises(GenerationFailed, match="status 401"):
        list(generate(other, prompts(1), limits=LIMITS))
