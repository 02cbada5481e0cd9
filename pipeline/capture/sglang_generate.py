"""Greedy answers from a running SGLang server: token ids in, token ids out, nothing lost.

Requests overlap up to a bound and come back in the prompts' order. A request that a transport fault
swallowed is sent again under the same prompt and a new try number; only one reply is ever kept.
Used where answers are wanted and not states: writing answers, and measuring a drafter.
"""

import http.client
import json
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from pipeline.capture.errors import CaptureError
from pipeline.settings.strict_json import parse_json

_TRIES = 4
_FIRST_PAUSE_SECONDS = 0.2
_AHEAD = 8  # prompts handed out beyond the oldest unanswered one, for each request in flight
_ENOUGH_DETAIL = 400  # characters of a server's complaint
_OF_THE_PROMPT = (
    http.HTTPStatus.BAD_REQUEST,
    http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    http.HTTPStatus.UNPROCESSABLE_ENTITY,
)


class GenerationFailed(CaptureError):
    """The server gave no usable answer to a prompt."""

    code = "CS-NO-ANSWER"


class NoAnswer(GenerationFailed):
    """One prompt is without an answer, and nothing says that others would be.

    reason: a code to count by.
    """

    reason = "no_answer"


class RepeatedId(NoAnswer):
    """What came bears the id of another request."""

    reason = "repeated_id"


class EmptyReply(NoAnswer):
    """An answer without a single token."""

    reason = "empty_answer"


class Server(Protocol):
    """What is needed of a running server; `SglangServer` is one. url: http://host:port."""

    url: str
    key: str

    def check(self) -> None:
        """Fault with the server's own last words when it has died."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: a name of its own and its token ids, at least one."""

    id: str
    input_ids: tuple[int, ...]


@dataclass(frozen=True)
class Generated:
    """The answer to one prompt.

    output_ids: the end of turn included where it was reached (`stop`), else cut at the limit
    (`length`). meta: the server's `meta_info` as it came. tries: requests that it took.
    """

    prompt: Prompt
    output_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    meta: Mapping[str, Any]
    tries: int


@dataclass(frozen=True)
class Limits:
    """How answers are asked for.

    max_new_tokens: an answer that reaches it is cut. end_ids: ids that end an answer. concurrency:
    requests that the server has at once. timeout_seconds: longest wait for one reply.
    """

    max_new_tokens: int
    end_ids: frozenset[int]
    concurrency: int
    timeout_seconds: float


def generate(
    server: Server,
    prompts: Iterable[Prompt],
    *,
    limits: Limits,
    unanswered: Callable[[Prompt, NoAnswer], None] | None = None,
) -> Generator[Generated, None, None]:
    """Answers in the order of the prompts, which are read as they are needed.

    unanswered: told of a prompt without an answer, which is then left out; without it that is a
    fault as any other.

    Greedy. At most `concurrency` requests are in flight and a bounded number of answers wait for an
    earlier one. GenerationFailed names the prompt that got no usable answer after several tries or
    that the server refuses; a server that died raises its own fault. Closing the iterator early
    breaks the requests in flight off.
    """
    client = _Client(server, limits)
    waiting: deque[tuple[Prompt, Future[Generated]]] = deque()

    def oldest() -> Iterable[Generated]:
        prompt, future = waiting.popleft()
        try:
            return [future.result()]
        except NoAnswer as fault:
            if unanswered is None:
                raise
            unanswered(prompt, fault)
            return []

    pool = ThreadPoolExecutor(limits.concurrency, thread_name_prefix="generate")
    try:
        for number, prompt in enumerate(prompts):
            waiting.append((prompt, pool.submit(client.ask, prompt, number)))
            if len(waiting) >= _AHEAD * limits.concurrency:
                yield from oldest()
        while waiting:
            yield from oldest()
    finally:
        client.close()
        pool.shutdown(cancel_futures=True)


class _Client:
    """Requests of one `generate`, each on a connection of its own."""

    def __init__(self, server: Server, limits: Limits) -> None:
        self._server, self._limits = server, limits
        address = urlsplit(server.url)
        self._host, self._port = address.hostname or "", address.port or 80
        self._nonce = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = threading.Event()

    def ask(self, prompt: Prompt, number: int) -> Generated:
        """Asks until there is an answer. Faults as `generate` says."""
        trouble = ""
        kind_of_fault: type[NoAnswer] = NoAnswer
        for attempt in range(1, _TRIES + 1):
            kind_of_fault = NoAnswer
            body = {
                "rid": f"answer-{self._nonce}-{number}-{attempt}",
                "input_ids": list(prompt.input_ids),
                "sampling_params": {
                    "temperature": 0.0,
                    "max_new_tokens": self._limits.max_new_tokens,
                    "stop_token_ids": sorted(self._limits.end_ids),
                },
            }
            try:
                status, text = self._post(body)
                if status == http.HTTPStatus.OK:
                    value = parse_json(text, infinite=True)
                    kind = value["meta_info"]["finish_reason"]["type"]
                    if kind == "abort":
                        trouble = f"aborted: {value['meta_info']['finish_reason']}"
                    elif value["meta_info"]["id"] != body["rid"]:
                        kind_of_fault = RepeatedId
                        trouble = f"the reply is to {value['meta_info']['id']!r}"
                    else:
                        return read_answer(prompt, value, limits=self._limits, tries=attempt)
                elif 400 <= status < 500 and status != http.HTTPStatus.TOO_MANY_REQUESTS:
                    # What is wrong with a key or a path is wrong for every prompt.
                    refused = NoAnswer if status in _OF_THE_PROMPT else GenerationFailed
                    raise refused(
                        f"the server refuses prompt {prompt.id} of {len(prompt.input_ids)} tokens: "
                        f"status {status}: {text[:_ENOUGH_DETAIL]}",
                        wanted="a prompt that the server takes",
                        next_step="shorten it or leave it out; else see the server's log",
                    )
                else:
                    trouble = f"status {status}: {text[:_ENOUGH_DETAIL]}"
            except (
                *(OSError, http.client.HTTPException),
                *(ValueError, KeyError, TypeError, OverflowError),
            ) as error:
                trouble = f"{type(error).__name__}: {error}"
            if self._closed.is_set():
                break
            self._server.check()
            if attempt < _TRIES:
                self._closed.wait(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        raise kind_of_fault(
            f"prompt {prompt.id}: no answer in {_TRIES} tries; last: {trouble[:_ENOUGH_DETAIL]}",
            wanted="an answer of the server",
            next_step="see the server's log; the same command with RESUME=1 continues",
        )

    def _post(self, body: Mapping[str, Any]) -> tuple[int, str]:
        """Status and text of a reply from /generate. OSError or HTTPException on the way."""
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=self._limits.timeout_seconds
        )
        try:
            connection.connect()
            with self._lock:  # only what has a socket can be broken off
                if self._closed.is_set():
                    raise ConnectionAbortedError("the work was broken off")
                self._open.add(connection)
            connection.request(
                "POST",
                "/generate",
                body=json.dumps(body),
                headers={
                    "Content-Type": "application/json",
                    "Authorization": f"Bearer {self._server.key}",
                },
            )
            reply = connection.getresponse()
            return reply.status, reply.read().decode(errors="replace")
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """Breaks off what is in flight, so that nobody waits for a reply that nobody wants."""
        self._closed.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)


def read_answer(
    prompt: Prompt, value: Mapping[str, Any], *, limits: Limits, tries: int
) -> Generated:
    """Reads a reply and believes none of it unchecked. GenerationFailed when it contradicts itself.

    EmptyReply when it has no token. The ids stand in the reply as the target chose them; they are
    never decoded and encoded again.
    """
    meta = value["meta_info"]
    ids = tuple(int(token) for token in value["output_ids"])
    kind = meta["finish_reason"]["type"]
    if not ids and kind == "stop" and meta["completion_tokens"] == 0:
        raise EmptyReply(
            f"prompt {prompt.id}: the answer has no token",
            wanted="at least an end of turn",
            next_step="leave the prompt out; else see the server's log",
        )
    ended = bool(ids) and ids[-1] in limits.end_ids
    early = _first(ids[:-1], limits.end_ids)
    problem = ""
    if len(ids) != meta["completion_tokens"] or meta["prompt_tokens"] != len(prompt.input_ids):
        problem = (
            f"{len(ids)} ids, {meta['completion_tokens']} counted, for a prompt of "
            f"{len(prompt.input_ids)}, {meta['prompt_tokens']} counted"
        )
    elif early is not None:
        problem = f"an end of turn at {early} of {len(ids)} tokens"
    elif kind == "stop" and not ended:
        problem = f"stopped by {meta['finish_reason'].get('matched')!r}, not by an end of turn"
    elif kind == "length" and (len(ids) != limits.max_new_tokens):
        problem = f"cut after {len(ids)} tokens, of {limits.max_new_tokens} allowed"
    elif kind not in ("stop", "length"):
        problem = f"finish reason {meta['finish_reason']}"
    if problem:
        raise GenerationFailed(
            f"prompt {prompt.id}: {problem}",
            wanted=f"an answer that ends with one of {sorted(limits.end_ids)} or at the limit",
            next_step="a further end of the target belongs into target.end_of_turn; anything else "
            "is a fault of the server or of this program: please report it",
        )
    # The limit and the end of turn may fall on the same token; then the answer is whole.
    return Generated(prompt, ids, "stop" if ended else "length", meta, tries)


def _first(ids: Iterable[int], wanted: Collection[int]) -> int | None:
    """Place of the first of `ids` that is among `wanted`."""
    return next((at for at, token in enumerate(ids) if token in wanted), None)
