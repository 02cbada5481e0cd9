"""The client against a stand-in server process that misbehaves as told."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from pipeline.capture.contract import Answer, GroupDone, Receipt, Refusal, Request, ids_digest
from pipeline.capture.errors import CaptureError, ServerDied
from pipeline.capture.sglang_engine import SglangEngine
from pipeline.capture.sglang_probe import make_probes, run_probes
from pipeline.capture.sglang_server import SglangServer
from pipeline.capture.staging import Staging
from pipeline.settings.environment import child_environment

HERE = Path(__file__).parent
PREFIX = "cs-test-"
Start = Callable[..., "Running"]


class Running:
    def __init__(self, engine: SglangEngine, staging: Staging, server: SglangServer) -> None:
        self.engine, self.staging, self.server = engine, staging, server

    def ask(self, *requests: Request) -> list[Answer]:
        self.engine.submit(requests)
        answers, found = self.engine.answers(), []
        while not found or not isinstance(found[-1], GroupDone):
            found.append(next(answers))
        return found

    def sent(self) -> list[str]:
        return (self.staging.folder / "requests.log").read_text().split()

    def files(self) -> list[str]:
        return sorted(path.name for path in self.staging.folder.glob("*.safetensors"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(
            replies: dict[str, Sequence[str]] | None = None,
            *,
            concurrency: int = 4,
            timeout: float = 5.0,
        ) -> Running:
            folder = tmp_path / "staging"
            folder.mkdir()
            script = tmp_path / "script.json"
            told = {"prefix": PREFIX, "staging": str(folder), "replies": replies or {}}
            script.write_text(json.dumps(told))
            path = f"{HERE.parent.parent}:{HERE / 'stand_in_server'}"
            server = stack.enter_context(
                SglangServer(
                    ["--script", str(script)],
                    python=Path(sys.executable),
                    environment=child_environment({"PYTHONPATH": path}),
                    log=tmp_path / "server.log",
                    startup_timeout_seconds=20,
                    say=lambda _line: None,
                )
            )
            staging = Staging(folder, quota_bytes=1 << 20)
            engine = SglangEngine(
                server,
                staging,
                rid_prefix=PREFIX,
                concurrency=concurrency,
                timeout_seconds=timeout,
                vocabulary_size=1000,
            )
            return Running(stack.enter_context(engine), staging, server)

        yield begin


def request(name: str, *, length: int = 5, logprobs: bool = False) -> Request:
    return Request(name, torch.arange(3, 3 + length, dtype=torch.int32), logprobs)


def test_a_receipt_carries_what_the_plugin_said(start: Start) -> None:
    run = start()
    [receipt, done] = run.ask(request("s-1"))
    ids = request("s-1").input_ids
    assert receipt == Receipt(
        id="s-1", rows=5, spans=((0, 5),), ids_sha256=ids_digest(ids), dtype="bfloat16",
        taps=(1, 2, 3), file="cs-test-s-1-1.safetensors", logprobs=None,
    )  # fmt: skip
    assert done == GroupDone(0)
    assert torch.equal(run.staging.read(receipt.file, timeout_seconds=0)["input_ids"], ids)


def test_log_probabilities_are_those_of_the_tokens_after_the_first(start: Start) -> None:
    [receipt, _] = start().ask(request("s-1", length=4, logprobs=True))
    assert isinstance(receipt, Receipt)
    assert receipt.logprobs == (-0.5, -1.0, -1.5)


def test_many_requests_are_answered_once_each(start: Start) -> None:
    run = start(concurrency=16)
    requests = [request(f"s-{n}", length=1 + n % 7) for n in range(60)]
    run.engine.submit(requests[:40])
    run.engine.submit(requests[40:])
    answers, found, done = run.engine.answers(), [], []
    while len(done) < 2:
        answer = next(answers)
        (done if isinstance(answer, GroupDone) else found).append(answer)
    assert sorted(answer.id for answer in found) == sorted(one.id for one in requests)
    assert all(isinstance(answer, Receipt) for answer in found)


@pytest.mark.parametrize("fault", ["http500", "cut", "cut_after_file", "not_json"])
def test_a_transport_fault_is_tried_again_and_leaves_one_result(start: Start, fault: str) -> None:
    run = start({"s-1": [fault]})
    [receipt, _] = run.ask(request("s-1"))
    assert isinstance(receipt, Receipt)
    assert run.sent() == ["cs-test-s-1-1", "cs-test-s-1-2"]
    assert run.files() == [receipt.file] == ["cs-test-s-1-2.safetensors"]


def test_a_fault_that_stays_is_refused_with_what_the_server_said(start: Start) -> None:
    run = start({"s-1": ["http500"] * 3})
    assert run.ask(request("s-1"))[0] == Refusal(
        "s-1", "transport", "HTTP 500: (no message) (3 tries)"
    )


@pytest.mark.parametrize(
    ("fault", "reason", "says"),
    [
        ("http400", "request", "too long"),
        ("refuse", "retracted", "prefilled again"),
        ("cached", "prefix_cache", "3 of 5 tokens came from the prefix cache"),
        ("fewer_tokens", "row_count", "the server ran 4 of 5 tokens"),
        ("no_receipt", "no_receipt", "the capture plugin did not run"),
        ("other_id", "other_reply", "somebody"),
        ("other_receipt", "other_reply", "somebody"),
        ("other_file", "receipt", "elsewhere"),
        ("other_logprobs", "logprobs", "not those of the prompt"),
        ("abort", "aborted", "aborted by the server"),
        ("failed", "io", "No space left"),
    ],
)
def test_a_reply_that_is_not_whole_is_refused_once(
    start: Start, fault: str, reason: str, says: str
) -> None:
    run = start({"s-1": [fault]})
    [refusal, _] = run.ask(request("s-1", logprobs=True))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason
    assert says in refusal.detail
    assert len(run.sent()) == 1
    assert run.files() == []


def test_a_refused_sample_that_is_sent_again_has_a_new_request_id(start: Start) -> None:
    run = start({"s-1": ["refuse"]})
    assert isinstance(run.ask(request("s-1"))[0], Refusal)
    assert isinstance(run.ask(request("s-1"))[0], Receipt)
    assert run.sent() == ["cs-test-s-1-1", "cs-test-s-1-2"]


def test_a_receipt_waits_for_its_file(start: Start) -> None:
    run = start({"s-1": ["late_file"]})
    [receipt, _] = run.ask(request("s-1"))
    assert isinstance(receipt, Receipt)
    assert run.files() == [receipt.file]


@pytest.mark.parametrize("fault", ["silent", "no_file"])
def test_a_reply_or_file_that_does_not_come_in_time_is_refused(start: Start, fault: str) -> None:
    run = start({"s-1": [fault]}, timeout=1.0)
    began = time.monotonic()
    [refusal, _] = run.ask(request("s-1"))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "timeout"
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("ids", [[], [5, 1000], [-1]])
def test_ids_that_would_end_the_server_are_not_sent(start: Start, ids: list[int]) -> None:
    run = start()
    [refusal, _] = run.ask(Request("s-1", torch.tensor(ids, dtype=torch.int32)))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "bad_ids"
    assert not (run.staging.folder / "requests.log").exists()


@pytest.mark.parametrize("fault", ["die", "kill_rank"])
def test_the_death_of_the_server_ends_the_work_at_once(start: Start, fault: str) -> None:
    run = start({"s-1": [fault]}, timeout=60.0)
    began = time.monotonic()
    with pytest.raises(ServerDied):
        run.ask(request("s-1"), request("s-2"))
    assert time.monotonic() - began < 5


def test_a_sample_id_of_any_form_gives_a_plain_request_id(start: Start) -> None:
    run = start()
    [receipt, _] = run.ask(request("lines/12: ä"))
    assert isinstance(receipt, Receipt)
    assert receipt.id == "lines/12: ä"
    assert receipt.file.isascii()
    assert "/" not in receipt.file


def probe(run: Running) -> list[str]:
    return run_probes(
        run.engine,
        make_probes(range(1, 200), chunked_prefill_tokens=64, longest=500),
        staging=run.staging,
        taps=(1, 2, 3),
        hidden_size=4,
        log=run.server.log,
        say=lambda _line: None,
    )


def test_the_probes_are_the_prompt_twice_a_shared_prefix_and_a_long_one() -> None:
    probes = make_probes(range(1, 200), chunked_prefill_tokens=64, longest=500)
    first, again, branch, long = (one.input_ids for one in probes)
    assert torch.equal(first, again)
    assert torch.equal(first[:32], branch[:32])
    assert not torch.equal(first[32:], branch[32:])
    assert len(long) == 97
    assert not torch.equal(long[:48], first)


@pytest.mark.parametrize(("chunk", "longest"), [(-1, 500), (8192, 2048)])
def test_without_chunks_there_is_no_probe_of_them(chunk: int, longest: int) -> None:
    assert len(make_probes([1, 2, 3], chunked_prefill_tokens=chunk, longest=longest)) == 3


def test_whole_probes_are_told(start: Start) -> None:
    assert probe(start())[-1] == "prompt longer than a chunk: 97 rows in 1 spans, whole"


@pytest.mark.parametrize(
    ("replies", "flag"),
    [
        ({"probe-1": ["cached"]}, "--disable-radix-cache"),
        ({"probe-3": ["refuse"]}, "--chunked-prefill-size"),
        ({"probe-0": ["no_receipt"]}, "the capture plugin in the server"),
    ],
)
def test_a_probe_that_is_not_whole_names_the_flag_at_fault(
    start: Start, replies: dict[str, Sequence[str]], flag: str
) -> None:
    run = start(replies)
    with pytest.raises(CaptureError, match=f"at fault: {flag}"):
        probe(run)
