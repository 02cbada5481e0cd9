"""The child process in which an engine runs: groups come in as sample numbers, answers go out.

Request: {"engine", "folder", "prepared", "staging", "quota_bytes", "taps", "hidden_size", "dtype",
"device", "remote_code", "threads"}; then one line a group: {"samples": [number, ...],
"logprobs": [number, ...]}, numbers counting the prepared samples.
"""

import queue
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeline.capture.contract import Engine, GroupDone, Receipt, Request
from pipeline.capture.staging import Staging
from pipeline.slate.worker import Channel, run_worker
from pipeline.store.reader import PreparedSamples
from pipeline.target.tensors import read_head


def main(request: dict[str, Any], channel: Channel) -> None:
    """Runs the engine until the parent closes its end."""
    torch.set_num_threads(request["threads"])
    samples = PreparedSamples.open(Path(request["prepared"]))
    engine = _engine(request)
    channel.emit({"event": "ready"})
    # A thread of its own takes the lines in, so that the parent never blocks on a full pipe.
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in channel.receive():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (line := lines.get()) is not None:
        flagged = set(line["logprobs"])
        engine.submit(
            [
                Request(
                    samples.entries[number].id,
                    samples.read(samples.entries[number]).input_ids,
                    number in flagged,
                )
                for number in line["samples"]
            ]
        )
        for answer in engine.answers():
            if isinstance(answer, GroupDone):
                channel.emit({"event": "group", "number": answer.number})
                break
            kind = "receipt" if isinstance(answer, Receipt) else "refusal"
            channel.emit({"event": kind, **asdict(answer)})


def _engine(request: dict[str, Any]) -> Engine:
    staging = Staging(Path(request["staging"]), quota_bytes=request["quota_bytes"])
    folder = Path(request["folder"])
    if request["engine"] == "stand_in":
        from pipeline.capture.stand_in import StandIn

        return StandIn(
            staging,
            hidden_size=request["hidden_size"],
            taps=request["taps"],
            head=read_head(folder),
        )
    from pipeline.capture.transformers_engine import TransformersEngine

    return TransformersEngine(
        folder,
        staging,
        taps=request["taps"],
        dtype=getattr(torch, request["dtype"]),
        device=request["device"],
        remote_code=request["remote_code"],
    )


if __name__ == "__main__":
    run_worker(main)
