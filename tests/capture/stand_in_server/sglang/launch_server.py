"""A server that speaks as much of SGLang's HTTP as the client needs, and misbehaves when told to.

A process of its own, with a child that stands for a rank. `--script FILE` names a JSON file:
{"prefix": ..., "staging": folder, "start": fault or null,
 "replies": {sample id: [fault of try 1, fault of try 2, ...]}}.
"""

import argparse
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np

WIDTH = 4
TRACEBACKS = """[2026-11-29 16:00:01] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise ValueError
ValueError: bad weights
[2026-11-29 16:00:01] TP1 Scheduler hit an exception: Traceback (most recent call last):
  File "connection.py", line 9, in receive
EOFError"""


def rows_of(ids: list[int]) -> np.ndarray:
    """bf16 bit patterns of finite values that are never zero."""
    return np.array([[0x3F80 + one % 64] * WIDTH for one in ids], dtype=np.uint16)


def write_states(folder: Path, rid: str, ids: list[int]) -> None:
    rows, header, data, offset = rows_of(ids).tobytes(), {}, b"", 0
    for name in ("tap_0", "tap_1", "tap_2", "final"):
        end = offset + len(rows)
        spot = {"shape": [len(ids), WIDTH], "data_offsets": [offset, end]}
        header[name] = {"dtype": "BF16", **spot}
        data, offset = data + rows, end
    own = np.array(ids, dtype=np.int32).tobytes()
    spot = {"shape": [len(ids)], "data_offsets": [offset, offset + len(own)]}
    header["input_ids"] = {"dtype": "I32", **spot}
    text = json.dumps(header).encode()
    partial = folder / f".{rid}.safetensors.partial"
    partial.write_bytes(struct.pack("<Q", len(text)) + text + data + own)
    partial.rename(folder / f"{rid}.safetensors")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: ClassVar[dict] = {}
    key = ""
    tries: ClassVar[dict] = {}
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/health":
            return self.answer(200, {})
        if self.headers.get("Authorization") != f"Bearer {self.key}":
            return self.answer(401, {"error": "Unauthorized"})
        return self.answer(200, {"version": "0.5.23", "disable_radix_cache": True})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {self.key}":
            return self.answer(401, {"error": "Unauthorized"})
        if self.path == "/abort_request":
            return self.answer(200, {})
        return self.generate(body)

    def generate(self, body: dict) -> None:
        rid, ids = body["rid"], body["input_ids"]
        sample = rid.removeprefix(self.script["prefix"]).rpartition("-")[0]
        with self.lock:
            number = self.tries[sample] = self.tries.get(sample, 0) + 1
        with (Path(self.script["staging"]) / "requests.log").open("a") as log:
            log.write(f"{rid}\n")
        faults = self.script["replies"].get(sample, [])
        fault = faults[number - 1] if number <= len(faults) else "none"
        receipt = {
            "rid": rid, "ok": True, "reason": None, "detail": None, "rows": len(ids),
            "spans": [[0, len(ids)]], "dtype": "bfloat16", "taps": [1, 2, 3],
            "ids_sha256": hashlib.sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest(),
            "file": f"{rid}.safetensors", "rank": {"tp": 0, "dp": 0, "pid": os.getpid()},
        }  # fmt: skip
        meta = {"id": rid, "prompt_tokens": len(ids), "cached_tokens": 0,
                "finish_reason": {"type": "length", "length": 1}}  # fmt: skip
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = [[None if not at else -0.5 * at, one, None]
                                            for at, one in enumerate(ids)]  # fmt: skip
        folder = Path(self.script["staging"])
        if fault == "die":
            os._exit(7)
        if fault == "kill_rank":
            RANK.kill()
            time.sleep(60)
        if fault == "http500":
            return self.answer(500, {"error": {"message": ""}})
        if fault == "http400":
            return self.answer(400, {"error": {"message": "too long"}})
        if fault == "silent":
            time.sleep(60)
        if fault in ("cut", "cut_after_file"):
            if fault == "cut_after_file":
                write_states(folder, rid, ids)
            self.close_connection = True
            self.connection.close()
            return None
        if fault == "not_json":
            return self.raw(200, b"<html>")
        if fault == "refuse":
            receipt |= {"ok": False, "reason": "retracted", "detail": "prefilled again"}
        if fault == "cached":
            meta["cached_tokens"] = 3
        if fault == "fewer_tokens":
            meta["prompt_tokens"] -= 1
        if fault == "other_id":
            meta["id"] = f"{self.script['prefix']}somebody-1"
        if fault == "other_receipt":
            receipt["rid"] = f"{self.script['prefix']}somebody-1"
        if fault == "other_file":
            receipt["file"] = "../elsewhere.safetensors"
        if fault == "other_logprobs":
            meta["input_token_logprobs"][1][1] += 1
        if fault == "abort":
            meta["finish_reason"] = {"type": "abort", "message": "aborted by the server"}
        if fault == "failed":
            (folder / f"{rid}.failed").write_text('{"reason": "io", "detail": "No space left"}')
        elif fault == "late_file":
            threading.Timer(0.3, write_states, (folder, rid, ids)).start()
        elif fault != "no_file":
            write_states(folder, rid, ids)
        meta["cleanslate_capture"] = None if fault == "no_receipt" else [None, receipt]
        return self.answer(200, {"text": "", "meta_info": meta})

    def answer(self, status: int, value: dict) -> None:
        self.raw(status, json.dumps(value).encode())

    def raw(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--api-key")
    told = parser.parse_args()
    Handler.script, Handler.key = json.loads(told.script.read_text()), told.api_key
    start = Handler.script.get("start")
    sys.stderr.write("[2026-11-29 16:00:00] loading weights\n")
    if start == "raise":
        sys.exit(TRACEBACKS)
    if start == "port_taken_once" and not told.script.with_suffix(".tried").exists():
        told.script.with_suffix(".tried").touch()
        sys.exit("OSError: [Errno 98] Address already in use")
    if start == "never":
        time.sleep(600)
    if start == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    RANK = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "sglang::scheduler_TP0"]
    )
    Server((told.host, told.port), Handler).serve_forever()
