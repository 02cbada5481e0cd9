"""The engine contract over a running SGLang server: token ids out, receipts or refusals back.

Every request is sent by one thread, and answered once whatever happens to the connection: a retry
after a transport fault runs under a new request id, and what an older try may still write is
thrown away. A receipt is handed on only when its staging file is whole, so that the collector never
waits for a file whose writer waits for the collector.
"""

import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from types import TracebackType
from typing import Any, Self

import httpx

from pipeline.capture.contract import Answer, GroupDone, Receipt, Refusal, Request
from pipeline.capture.sglang_reply import BadReply, read_reply
from pipeline.capture.sglang_server import SglangServer
from pipeline.capture.staging import Staging, StagingFailed
from pipeline.settings.strict_json import parse_json

_TRIES = 3  # of one request, when the transport fails
_PAUSE_SECONDS = 0.5
_WATCH_SECONDS = 0.25
_PLAIN = re.compile(r"[A-Za-z0-9-]{1,64}")


class TransportFault(Exception):
    """The server did not answer as HTTP should; the request may be sent again."""


class SglangEngine:
    """Fulfils `Engine`; a context manager, to be left before the server is stopped.

    rid_prefix: the one that the plugin was told, new for every run. concurrency: requests in
    flight. timeout_seconds: for one reply with its file. vocabulary_size: ids at or above it are
    refused here, for one of them ends the server.
    """

    def __init__(
        self,
        server: SglangServer,
        staging: Staging,
        *,
        rid_prefix: str,
        concurrency: int,
        timeout_seconds: float,
        vocabulary_size: int,
    ) -> None:
        self._server, self._staging = server, staging
        self._prefix, self._timeout = rid_prefix, timeout_seconds
        self._vocabulary_size = vocabulary_size
        self._client = server.client(timeout_seconds=timeout_seconds)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="sglang-client")
        self._answers: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._tries: dict[str, int] = {}  # sample id -> tries so far
        self._abandoned: set[str] = set()  # request ids whose result nobody wants any more
        self._open: dict[int, int] = {}  # group -> requests not yet answered
        self._groups = 0
        self._busy = 0  # threads at work
        self._stopping = threading.Event()

    def submit(self, group: Sequence[Request]) -> None:
        """See `Engine.submit`."""
        number = self._groups
        self._groups += 1
        with self._lock:
            self._open[number] = len(group)
        if not group:
            self._answers.put(GroupDone(number))
        for request in group:
            self._pool.submit(self._serve, request, number)

    def answers(self) -> Iterator[Answer]:
        """See `Engine.answers`. ServerDied as soon as the server or one of its ranks is gone."""
        while True:
            try:
                answer = self._answers.get(timeout=_WATCH_SECONDS)
            except queue.Empty:
                self._server.check()
                continue
            if isinstance(answer, BaseException):
                raise answer
            yield answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            idle = self._busy == 0
        if idle:
            self._client.close()  # else the last thread does; all end when the server is stopped
        self.sweep()

    def sweep(self) -> None:
        """Frees what abandoned tries have left in the staging folder by now."""
        with self._lock:
            abandoned = sorted(self._abandoned)
        for rid in abandoned:
            self._staging.free(f"{rid}.safetensors")

    def _serve(self, request: Request, group: int) -> None:
        with self._lock:
            self._busy += 1
        try:
            answer: Answer | BaseException = self._answer(request)
        except BaseException as error:  # handed to the thread that reads the answers
            answer = error
        self._answers.put(answer)
        with self._lock:
            self._busy -= 1
            self._open[group] -= 1
            done = self._open[group] == 0
            if done:
                del self._open[group]
            last = self._busy == 0 and self._stopping.is_set()
        if last:
            self._client.close()
        elif done:
            self._answers.put(GroupDone(group))
            self.sweep()

    def _answer(self, request: Request) -> Receipt | Refusal:
        ids = request.input_ids.tolist()
        if not ids or min(ids) < 0 or max(ids) >= self._vocabulary_size:
            what = f"ids from {min(ids)} to {max(ids)}" if ids else "no ids"
            return Refusal(
                request.id, "bad_ids", f"{what}, the target knows 0 to {self._vocabulary_size - 1}"
            )
        fault = ""
        for attempt in range(_TRIES):
            if attempt and self._stopping.wait(_PAUSE_SECONDS * 2**attempt):
                break
            rid = self._new_rid(request.id)
            deadline = time.monotonic() + self._timeout
            try:
                reply = self._post(rid, ids, logprobs=request.logprobs)
                answer = read_reply(request, reply, rid=rid)
                if isinstance(answer, Receipt):
                    left = max(deadline - time.monotonic(), 1.0)
                    self._staging.wait(answer.file, timeout_seconds=left)
                else:
                    self._abandon(rid)
                return answer
            except TransportFault as error:
                if self._stopping.is_set():
                    break
                self._abandon(rid)
                self._server.check()
                fault = str(error)
            except TimeoutError as error:
                self._abandon(rid)
                return Refusal(request.id, "timeout", str(error))
            except BadReply as error:
                self._abandon(rid)
                return Refusal(request.id, error.reason, error.detail)
            except StagingFailed as error:
                self._staging.free(f"{rid}.safetensors")
                return Refusal(request.id, error.reason, error.detail)
        return Refusal(request.id, "transport", f"{fault} ({_TRIES} tries)")

    def _post(self, rid: str, ids: Sequence[int], *, logprobs: bool) -> Mapping[str, Any]:
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": ids,
            # One token: with none, SGLang leaves the receipt out of the reply.
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }
        if logprobs:
            body |= {"return_logprob": True, "logprob_start_len": 0}
        try:
            reply = self._client.post("/generate", json=body)
        except httpx.ReadTimeout as error:
            raise TimeoutError(f"no reply in {self._timeout:.0f} s") from error
        except httpx.HTTPError as error:
            raise TransportFault(f"{type(error).__name__}: {error}") from error
        if reply.status_code >= 500 or reply.status_code in (408, 429):
            raise TransportFault(f"HTTP {reply.status_code}: {_message(reply)}")
        if reply.status_code != httpx.codes.OK:
            raise BadReply("request", f"HTTP {reply.status_code}: {_message(reply)}")
        try:
            value = parse_json(reply.content, infinite=True)
        except ValueError as error:
            raise TransportFault(f"a reply that is not JSON: {reply.text[:80]!r}") from error
        if not isinstance(value, dict):
            raise BadReply("reply", f"a reply that is {type(value).__name__}, not an object")
        return value

    def _new_rid(self, sample_id: str) -> str:
        with self._lock:
            number = self._tries[sample_id] = self._tries.get(sample_id, 0) + 1
        plain = (
            sample_id
            if _PLAIN.fullmatch(sample_id)
            else sha256(sample_id.encode()).hexdigest()[:32]
        )
        return f"{self._prefix}{plain}-{number}"

    def _abandon(self, rid: str) -> None:
        """Tells the server to forget a try; whether it does or not, its result is thrown away."""
        with self._lock:
            self._abandoned.add(rid)
        with contextlib.suppress(httpx.HTTPError, RuntimeError):  # the server may be gone
            self._client.post("/abort_request", json={"rid": rid}, timeout=5.0)
        self._staging.free(f"{rid}.safetensors")


def _message(reply: httpx.Response) -> str:
    """What an error reply says, or that it says nothing."""
    try:
        error = reply.json()["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        said = reply.text
    return str(said).strip()[:300] or "(no message)"
