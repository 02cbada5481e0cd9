"""A server that speaks as much of SGLang's HTTP as the extract stage needs, and captures states.

Row i of its states is a fixed function of the whole prefix, that of pipeline/capture/stand_in.py:
a row that is left out, moved, repeated or swapped shows. `--faults FILE` names a JSON file:

    "flags":  {...}     laid over what /server_info says
    "cache":  null      off; or how a prefix cache shows: "told" (cached_tokens), "untold" (rows are
                        missing), "hidden" (later rows take the place of the missing ones)
    "probes": true      whether the faults begin with the probes, or with the first sample
    "last_chunk": false only the rows of the last chunk come
    "files":  {id: how} how a sample's file is written: "halves", "growing", "late", "empty_first",
                        "dies"
"""

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

CACHED_FROM = 32  # tokens: the shortest prefix that this cache keeps
PAUSE_SECONDS = 0.2


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bit patterns, rounded to the nearest and to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def states_of(ids: list[int], width: int) -> np.ndarray:
    """[4, n, H] bit patterns."""
    value, rows = 17, []
    for token in ids:
        value = (value * 48271 + token + 1) % 2_147_483_647
        rows.append(value)
    seeds = np.array(rows, dtype=np.float64)[None, :, None]
    channel = np.arange(1, 5, dtype=np.float64)[:, None, None]
    position = np.arange(1, width + 1, dtype=np.float64)[None, None, :]
    return to_bfloat16(np.sin(seeds * 1e-3 * channel + position))


class Target:
    """The width and the head, [V, H], of a folder with one bf16 file."""

    def __init__(self, folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        start = 8 + struct.unpack("<Q", raw[:8])[0]
        entry = json.loads(raw[8:start])["lm_head.weight"]
        first, last = (start + place for place in entry["data_offsets"])
        head = np.frombuffer(raw[first:last], dtype=np.uint16).reshape(entry["shape"])
        self.head, self.width = from_bfloat16(head), entry["shape"][1]

    def logprobs(self, final: np.ndarray, ids: list[int]) -> list[float]:
        logits = from_bfloat16(final[:-1]) @ self.head.T
        logits -= logits.max(1, keepdims=True)
        scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return [float(row[token]) for row, token in zip(scores, ids[1:], strict=True)]


def as_safetensors(states: np.ndarray, ids: list[int]) -> bytes:
    header: dict[str, Any] = {}
    data = b""
    names = ("tap_0", "tap_1", "tap_2", "final")
    parts = [(name, "BF16", part) for name, part in zip(names, states, strict=True)]
    for name, dtype, part in [*parts, ("input_ids", "I32", np.array(ids, dtype=np.int32))]:
        end = len(data) + part.nbytes
        header[name] = {
            "dtype": dtype, "shape": list(part.shape), "data_offsets": [len(data), end],
        }  # fmt: skip
        data += part.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(path: Path, whole: bytes, how: str) -> None:
    """Writes a file in the way that is named; all but the right one use its own name at once."""
    if how in ("right", "late"):
        time.sleep(PAUSE_SECONDS if how == "late" else 0)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(whole)
        partial.rename(path)
        return
    pieces = 8 if how == "growing" else 2
    step = -(-len(whole) // pieces)
    with path.open("wb") as file:
        if how == "empty_first":
            time.sleep(PAUSE_SECONDS)
        for start in range(0, len(whole), step):
            file.write(whole[start : start + step])
            file.flush()
            if how == "dies":
                return
            time.sleep(PAUSE_SECONDS / (pieces - 1) if how != "empty_first" else 0)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    key = ""
    chunk = 0
    faults: ClassVar[dict[str, Any]] = {}
    capture: ClassVar[dict[str, Any]] = {}
    target: ClassVar[Target]
    seen: ClassVar[list[list[int]]] = []
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/health":
            return self.answer(200, {})
        info = {
            "version": "0.5.23", "disable_radix_cache": True, "disable_cuda_graph": True,
            "device": "cpu", "chunked_prefill_size": self.chunk, "max_req_input_len": 2047,
        }  # fmt: skip
        return self.answer(200, info | self.faults.get("flags", {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {self.key}":
            return self.answer(401, {"error": "Unauthorized"})
        if self.path != "/generate":
            return self.answer(200, {})
        return self.generate(body["rid"], body["input_ids"], bool(body.get("return_logprob")))

    def generate(self, rid: str, ids: list[int], logprobs: bool) -> None:
        faulty = self.faults.get("probes", True) or "-probe-" not in rid
        cache = self.faults.get("cache") if faulty else None
        states = states_of(ids, self.target.width)
        kept = self.cached(ids) if cache else 0
        if faulty and self.faults.get("last_chunk"):
            kept = (len(ids) - 1) // self.chunk * self.chunk
        given = states[:, kept:]
        spans = [[a, min(a + self.chunk, len(ids))] for a in range(kept, len(ids), self.chunk)]
        if cache == "hidden" and kept:
            again = np.repeat(given[:, -1:], kept, axis=1)
            given, spans = np.concatenate([given, again], axis=1), [[0, len(ids)]]
        receipt = {
            "rid": rid, "ok": True, "rows": given.shape[1], "spans": spans, "dtype": "bfloat16",
            "taps": self.capture["taps"], "file": f"{rid}.safetensors",
            "ids_sha256": hashlib.sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest(),
        }  # fmt: skip
        meta: dict[str, Any] = {
            "id": rid, "prompt_tokens": len(ids), "finish_reason": {"type": "length", "length": 1},
            "cached_tokens": kept if cache == "told" else 0,
            "cleanslate_capture": [None] * (len(spans) - 1) + [receipt],
        }  # fmt: skip
        if logprobs:
            scores = [None, *self.target.logprobs(states[3], ids)]
            meta["input_token_logprobs"] = [
                [score, token, None] for score, token in zip(scores, ids, strict=True)
            ]
        sample = rid.removeprefix(self.capture["rid_prefix"]).rpartition("-")[0]
        how = self.faults.get("files", {}).get(sample, "right")
        path = Path(self.capture["staging"]) / f"{rid}.safetensors"
        whole = as_safetensors(np.ascontiguousarray(given), ids)
        if how == "right":
            write(path, whole, how)
        else:  # the reply is not held back for the file
            threading.Thread(target=write, args=(path, whole, how), daemon=True).start()
        return self.answer(200, {"text": "", "meta_info": meta})

    def cached(self, ids: list[int]) -> int:
        """Tokens of the longest beginning that an earlier request had."""
        with self.lock:
            longest = 0
            for seen in self.seen:
                same = 0
                while same < min(len(seen), len(ids) - 1) and seen[same] == ids[same]:
                    same += 1
                longest = max(longest, same)
            self.seen.append(ids)
        return longest if longest >= CACHED_FROM else 0

    def answer(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
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
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--chunked-prefill-size", type=int)
    parser.add_argument("--faults", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--api-key")
    told, _ = parser.parse_known_args()
    Handler.key, Handler.chunk = told.api_key, told.chunked_prefill_size
    Handler.faults = json.loads(told.faults.read_text())
    Handler.capture = json.loads(Path(os.environ["CLEANSLATE_CAPTURE"]).read_text())  # noqa: TID251
    Handler.target = Target(told.model_path)
    rank = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "sglang::scheduler_TP0"]
    )
    Server((told.host, told.port), Handler).serve_forever()
