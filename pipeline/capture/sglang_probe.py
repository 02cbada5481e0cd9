"""Start-up probes: requests that a faulty server would answer in part, before the first sample.

The same prompt twice and two prompts with a common beginning find a prefix cache; one that is
longer than a chunk finds a server that keeps the last chunk only. Each must come back whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.capture.collector import Wrong, collect
from pipeline.capture.contract import Engine, GroupDone, Receipt, Refusal, Request
from pipeline.capture.errors import CaptureError
from pipeline.capture.staging import Staging
from pipeline.store.index import Sample

_TOKENS, _SHARED = 48, 32
_PLUGIN = (
    "the capture plugin in the server (entry point sglang.srt.plugins: cleanslate; the log has "
    "what SGLang said of it)"
)
_CACHE = "--disable-radix-cache"
_CHUNK = "--chunked-prefill-size"
_AT_FAULT = {
    "no_receipt": _PLUGIN,
    "prefix_cache": _CACHE,
    "no_states": "--disable-cuda-graph, or a model class without EAGLE-3 support",
    "taps": _PLUGIN,
}


@dataclass(frozen=True)
class Probe:
    """One request: what it is for, its ids [n] int32, the flag that a short answer points at."""

    name: str
    input_ids: Tensor
    flag: str


def make_probes(
    ids: Sequence[int], *, chunked_prefill_tokens: int, longest: int
) -> tuple[Probe, ...]:
    """Probes out of token ids of real samples (not all ids of a vocabulary may be sent).

    ids: some hundred, repeated as needed. longest: most tokens that a request may have; without
    chunks, or with chunks that no request fills, the last probe is left out.
    """
    many = torch.tensor(ids, dtype=torch.int32)
    length = min(_TOKENS, longest)
    base = _cycle(many, length)
    shared = min(_SHARED, length - 1)
    branch = torch.cat([base[:shared], base[shared:].flip(0).roll(1)])
    probes = [
        Probe("prompt", base, _CACHE),
        Probe("same prompt again", base, _CACHE),
        Probe("prompt with a shared prefix", branch, _CACHE),
    ]
    beyond = chunked_prefill_tokens + chunked_prefill_tokens // 2 + 1
    if 0 < chunked_prefill_tokens < longest:
        # Begins unlike the others, so that only its length is tried.
        long = _cycle(many.flip(0), min(beyond, longest))
        probes.append(Probe("prompt longer than a chunk", long, _CHUNK))
    return tuple(probes)


def _cycle(ids: Tensor, length: int) -> Tensor:
    return ids.repeat(length // len(ids) + 1)[:length].clone()


def run_probes(
    engine: Engine,
    probes: Sequence[Probe],
    *,
    staging: Staging,
    taps: Sequence[int],
    hidden_size: int,
    log: Path,
    say: Callable[[str], None],
) -> list[str]:
    """Sends the probes one after the other; gives a line on each.

    CaptureError, naming the flag at fault, for the first that does not come back whole.
    """
    lines = []
    answers = engine.answers()
    for number, probe in enumerate(probes):
        sample = Sample(
            f"probe-{number}",
            probe.input_ids,
            torch.zeros(len(probe.input_ids), dtype=torch.bool),
            "train",
        )
        engine.submit([Request(sample.id, probe.input_ids)])
        answer = _one(answers)
        wrong = (
            Wrong(answer.reason, answer.detail)
            if isinstance(answer, Refusal)
            else collect(
                answer,
                sample,
                staging=staging,
                taps=taps,
                hidden_size=hidden_size,
                timeout_seconds=60.0,
            )
        )
        if isinstance(wrong, Wrong):
            raise _refused(probe, wrong, log)
        spans = len(answer.spans) if isinstance(answer, Receipt) else 0
        lines.append(f"{probe.name}: {len(probe.input_ids)} rows in {spans} spans, whole")
        say(f"probe: {lines[-1]}")
    return lines


def _one(answers: Iterator[object]) -> Receipt | Refusal:
    answer, done = next(answers), next(answers)
    if not isinstance(answer, Receipt | Refusal) or not isinstance(done, GroupDone):
        raise CaptureError(
            f"the engine answered {type(answer).__name__}, then {type(done).__name__}",
            wanted="one answer and the end of the group",
            next_step="this is a fault of the engine: please report it with the log",
        )
    return answer


def _refused(probe: Probe, wrong: Wrong, log: Path) -> CaptureError:
    flag = _AT_FAULT.get(wrong.reason, probe.flag)
    return CaptureError(
        f"start-up probe ({probe.name}, {len(probe.input_ids)} tokens): {wrong.detail} "
        f"({wrong.reason}); at fault: {flag}",
        wanted="a server that gives every row of every prompt; no sample was sent",
        next_step=f"see extract.server and its extra_arguments, and {log}",
    )
