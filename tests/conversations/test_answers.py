import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pipeline.conversations.answer_worker import encode_prompt, greedy_batch, main
from pipeline.conversations.answers import (
    Answer,
    append_batch,
    plan_batches,
    read_answers,
    take_back,
)
from pipeline.conversations.errors import ConversationError
from pipeline.slate.worker import Channel
from pipeline.target.facts import read_facts
from pipeline.target.load import load_target
from pipeline.target.random import make_random_target
from pipeline.target.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
END = frozenset({3})
LIMIT = 12
WORDS = ["sea", "steam engine", "sky", "dinner", "a good book about history", "12", "desert", "?"]


def answer(name: str, ids: list[int], reason: str) -> Answer:
    messages = ({"role": "user", "content": name},)
    return Answer(name, (5, 6), tuple(ids), reason, messages)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose end of turn is likely, so that answers end at different lengths."""
    folder = tmp_path_factory.mktemp("target")
    make_random_target(
        folder,
        seed=3,
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate_size=64,
        vocabulary_size=320,
    )
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][3] *= 2.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def request_of(target: Path, tmp_path: Path) -> dict[str, Any]:
    """A request for 24 prompts in batches of 5, and its prompts file."""
    prompts = tmp_path / "prompts.jsonl"
    with prompts.open("w") as file:
        for number in range(24):
            text = f"{WORDS[number % len(WORDS)]} {number}"
            messages = [{"role": "user", "content": text}]
            file.write(json.dumps({"id": f"p-{number}", "messages": messages}) + "\n")
    return {
        "folder": str(target),
        "prompts": str(prompts),
        "out": str(tmp_path / "answers.jsonl"),
        "batch_size": 5,
        "max_new_tokens": LIMIT,
        "dtype": "float32",
        "threads": 1,
        "end_of_turn_ids": sorted(END),
    }


def start(request: dict[str, Any]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "pipeline.conversations.answer_worker"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(request) + "\n")
    child.stdin.flush()
    return child


def events(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    return map(json.loads, child.stdout)


def run(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the worker's main in this process; gives its events."""
    answers = io.StringIO()
    main(request, Channel(io.StringIO(), answers))
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_every_prompt_is_answered_as_one_alone_would_be(
    target: Path, request_of: dict[str, Any]
) -> None:
    run(request_of)
    kept, counts = read_answers(Path(request_of["out"]), end_of_turn_ids=END)
    model = load_target(target, dtype=torch.float32, device="cpu")
    for found in kept:
        prompt = torch.tensor([found.prompt_ids])
        alone = model.generate(
            prompt, do_sample=False, max_new_tokens=LIMIT, eos_token_id=3, pad_token_id=1
        )
        assert alone[0].tolist() == found.input_ids
    assert counts.read == 24
    assert min(counts.stop, counts.length) > 0  # both ends happen, or this test proves little


def test_a_prompt_is_rendered_with_the_generation_prompt_and_tokenised_once(target: Path) -> None:
    tokenizer = load_tokenizer(target, remote_code=False)
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_progress_counts_every_prompt(request_of: dict[str, Any]) -> None:
    seen = run(request_of)
    assert [event.get("done") for event in seen] == [0, 5, 10, 15, 20, 24]
    _, counts = read_answers(Path(request_of["out"]), end_of_turn_ids=END)
    assert sum(event.get("cut", 0) for event in seen) == counts.length


def test_a_killed_run_resumes_to_the_same_file(request_of: dict[str, Any], tmp_path: Path) -> None:
    run(request_of)
    whole = Path(request_of["out"]).read_bytes()
    again = request_of | {"out": str(tmp_path / "again.jsonl")}
    with start(again) as child:
        for event in events(child):
            if event.get("done") == 10:
                child.send_signal(signal.SIGKILL)
                break
    with Path(again["out"]).open("ab") as file:
        file.write(b'{"id": "p-')  # what a kill in the middle of a write leaves
    with start(again) as child:
        resumed = list(events(child))
    assert resumed[0]["done"] >= 10
    assert resumed[-1] == {"event": "done"}
    assert Path(again["out"]).read_bytes() == whole
    assert [event.get("done") for event in run(again)] == [24]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"max_new_tokens": 5}, "max_new_tokens"), ({"batch_size": 4}, "batch_size")],
)
def test_a_resume_with_other_settings_is_refused(
    request_of: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    run(request_of)
    before = Path(request_of["out"]).read_bytes()
    with pytest.raises(ConversationError, match=named):
        run(request_of | change)
    assert Path(request_of["out"]).read_bytes() == before


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"id": "p-0", "messages": [{"role": "user", "content": "x"}]}', "a second time"),
        ('{"id": "q", "messages": []}', "q"),
        ("{", "prompts.jsonl:25"),
        (
            json.dumps({"id": "long", "messages": [{"role": "user", "content": "é" * 1100}]}),
            "'long' has 22",
        ),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_named_before_any_is(
    request_of: dict[str, Any], line: str, named: str
) -> None:
    with Path(request_of["prompts"]).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConversationError, match=named):
        run(request_of)
    assert not Path(request_of["out"]).exists()


def test_rows_that_end_do_not_change_the_others(target: Path) -> None:
    model = load_target(target, dtype=torch.float32, device="cpu")
    prompts = [[2, 40 + row, 60, *range(100, 100 + 3 * row)] for row in range(7)]
    together = greedy_batch(model, prompts, end_ids=END, max_new_tokens=LIMIT)
    alone = [
        greedy_batch(model, [prompt], end_ids=END, max_new_tokens=LIMIT)[0] for prompt in prompts
    ]
    assert together == alone
    assert len({len(ids) for ids in together}) > 1


def test_its_end_of_turn_is_the_targets(target: Path) -> None:
    assert frozenset(read_facts(target).eos_token_ids) == END


def test_a_cut_answer_is_supervised_without_an_end_and_a_whole_one_with() -> None:
    whole, cut = answer("a", [7, 8, 3], "stop"), answer("b", [7, 8], "length")
    assert (whole.input_ids, cut.input_ids) == ([5, 6, 7, 8, 3], [5, 6, 7, 8])
    assert whole.supervised == [False, False, True, True, True]
    assert cut.supervised == [False, False, True, True]


def test_ends_empties_and_repeats_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    stopped = [answer(f"s{n}", [7, 3], "stop") for n in range(5)]
    cut = [answer(f"c{n}", [7, 8], "length") for n in range(3)]
    append_batch(path, [*stopped, answer("e", [3], "stop"), *cut, answer("s0", [9, 3], "stop")])
    kept, counts = read_answers(path, end_of_turn_ids=END)
    assert (counts.read, counts.stop, counts.length) == (10, 5, 3)
    assert (counts.empty, counts.repeated, counts.kept) == (1, 1, 8)
    assert kept == [*stopped, *cut]


@pytest.mark.parametrize(("ids", "reason"), [([7, 8], "stop"), ([7, 3], "length"), ([], "stop")])
def test_a_finish_reason_that_contradicts_the_tokens_is_refused(
    tmp_path: Path, ids: list[int], reason: str
) -> None:
    append_batch(tmp_path / "a", [answer("x", ids, reason)])
    with pytest.raises(ConversationError, match="'x' has finish reason"):
        read_answers(tmp_path / "a", end_of_turn_ids=END)


@pytest.mark.parametrize("cut", [1, 20])
def test_a_cut_line_is_never_read_as_an_answer(tmp_path: Path, cut: int) -> None:
    append_batch(tmp_path / "a", [answer("x", [7, 3], "stop")])
    raw = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(raw + raw[:-cut] if cut > 1 else raw + b"{")
    with pytest.raises(ConversationError, match="a:2"):
        read_answers(tmp_path / "a", end_of_turn_ids=END)


@pytest.mark.parametrize(
    ("whole", "half", "batches"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 1), (2, 9, 1), (3, 0, 1), (4, 0, 2), (5, 0, 3)],
)
def test_only_whole_batches_are_kept_for_a_resume(
    tmp_path: Path, whole: int, half: int, batches: int
) -> None:
    path, plan = tmp_path / "a", [["p0", "p1"], ["p2", "p3"], ["p4"]]
    answers = [answer(f"p{n}", [7, 3], "stop") for n in range(5)]
    append_batch(path, answers[:whole])
    kept_bytes = len(path.read_bytes())
    with path.open("ab") as file:
        file.write(b"x" * half)
    assert take_back(path, plan) == batches
    assert path.stat().st_size == kept_bytes * min(2 * batches, 5) // max(whole, 1)


def test_answers_of_other_prompts_are_not_taken_for_these(tmp_path: Path) -> None:
    append_batch(tmp_path / "a", [answer("other", [7, 3], "stop")])
    with pytest.raises(ConversationError, match="'other'"):
        take_back(tmp_path / "a", [["p0"]])


@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    batch_size=st.integers(1, 9),
    window=st.integers(1, 20),
)
def test_a_plan_has_every_prompt_once_and_only_its_window(
    lengths: list[int], batch_size: int, window: int
) -> None:
    batches = plan_batches(lengths, batch_size=batch_size, window=window)
    places = [place for batch in batches for place in batch]
    assert sorted(places) == list(range(len(lengths)))
    assert all(len(batch) <= batch_size for batch in batches)
    assert all(len({place // window for place in batch}) == 1 for batch in batches)


def test_a_plan_puts_like_lengths_together() -> None:
    assert plan_batches([9, 1, 8, 2], batch_size=2) == ((1, 3), (2, 0))
