"""A server that answers ids with ids as SGLang's /generate does, and misbehaves as told.

The answer to a prompt that ends with token x is x + 1, x + 2 and so on up to END, which ends it.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END = 100


class AnsweringServer:
    """url, key, check: what a client uses. faults: first token of a prompt -> fault of each try."""

    def __init__(self) -> None:
        self.key = "the-key"
        self.url = ""
        self.faults: dict[int, list[str]] = {}
        self.seconds: dict[int, float] = {}  # first token of a prompt -> how long its answer takes
        self.together: threading.Barrier | None = None  # that many answer at the same time
        self.asked: list[dict[str, Any]] = []
        self.tries: Counter[int] = Counter()
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.checked = 0
        self.death: Exception | None = None

    def check(self) -> None:
        self.checked += 1
        if self.death is not None:
            raise self.death

    def fault_of(self, ids: list[int]) -> str:
        """A fault of every try of a prompt, or ""."""
        return ""

    def answer_of(self, ids: list[int], limit: int) -> list[int]:
        return list(range(ids[-1] + 1, END + 1))[:limit]


@contextmanager
def answering() -> Iterator[AnsweringServer]:
    told = AnsweringServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != f"Bearer {told.key}":
                return self.reply(401, {"error": "Unauthorized"})
            first = body["input_ids"][0]
            with told.lock:
                told.asked.append(body)
                told.tries[first] += 1
                number = told.tries[first]
                told.busy += 1
                told.most_busy = max(told.busy, told.most_busy)
            if told.together:
                told.together.wait(60)
            time.sleep(told.seconds.get(first, 0.0))
            with told.lock:
                told.busy -= 1
            faults = told.faults.get(first, [])
            fault = faults[number - 1] if number <= len(faults) else "none"
            return self.generate(body, told.fault_of(body["input_ids"]) or fault)

        def generate(self, body: dict[str, Any], fault: str) -> None:
            if fault in ("die", "drop"):
                told.death = RuntimeError("it died") if fault == "die" else None
                self.close_connection = True
                self.connection.close()
                return None
            if fault.isdigit():
                return self.reply(int(fault), {"error": {"message": "no"}})
            ids, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
            found = told.answer_of(ids, limit)
            end = body["sampling_params"]["stop_token_ids"][0]
            ended = found[-1] == end
            reason: dict[str, Any] = (
                {"type": "stop", "matched": end} if ended else {"type": "length", "length": limit}
            )
            meta = {
                "id": body["rid"],
                "prompt_tokens": len(ids),
                "completion_tokens": len(found),
                "finish_reason": reason,
            }
            if fault == "abort":
                reason |= {"type": "abort", "message": "no room"}
            if fault == "other_stop":
                meta["finish_reason"] = {"type": "stop", "matched": 7}
                found = found[:1]
                meta["completion_tokens"] = 1
            if fault == "early_end":
                found[0] = END
            if fault == "short":
                found = found[:-1]
            if fault == "cut_early":
                found = found[:1]
                meta |= {"completion_tokens": 1, "finish_reason": {"type": "length", "length": 1}}
            if fault == "other_id":
                meta["id"] = told.asked[0]["rid"] + "0"
            if fault == "other_prompt":
                meta["prompt_tokens"] += 1
            if fault == "not_json":
                return self.send(200, b"<html>")
            if fault == "empty":
                return self.reply(200, {})
            return self.reply(200, {"text": "", "output_ids": found, "meta_info": meta})

        def reply(self, status: int, value: dict[str, Any]) -> None:
            self.send(status, json.dumps(value).encode())

        def send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *arguments: object) -> None:
            """A client that broke off is no news."""

    server = Server(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
