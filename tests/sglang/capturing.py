"""A real server that captures, and what transformers says the rows should be."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pipeline.capture.collector import Wrong, collect
from pipeline.capture.contract import Answer, GroupDone, Receipt, Refusal, Request
from pipeline.capture.sglang_engine import SglangEngine
from pipeline.capture.sglang_flags import server_environment, server_flags
from pipeline.capture.sglang_probe import make_probes, run_probes
from pipeline.capture.sglang_server import SglangServer
from pipeline.capture.staging import Staging
from pipeline.settings.environment import child_environment, stage_environment
from pipeline.store.index import Sample
from pipeline.target.load import load_target
from tests.sglang.tiny import HIDDEN, PYTHON, TARGETS, VOCABULARY

TAPS = (1, 4, 6)
PREFIX = "cs-real-"
LONGEST = 200
ROW_BYTES = 4 * HIDDEN * 2 + 4


@dataclass(frozen=True)
class Case:
    """One way to run the server."""

    target: Literal["LlamaForCausalLM", "DeepseekV3ForCausalLM"]
    chunk: int
    tensor_parallel: int = 1
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    radix_cache: bool = False
    flags: tuple[str, ...] = ()
    quota_requests: int = 8
    gpus: tuple[int, ...] = ()
    python: Path = PYTHON

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Where the server computes."""
        return "cuda" if self.gpus else "cpu"

    @property
    def tolerance(self) -> float:
        """Greatest relative difference of a sample's states to transformers in float32."""
        return 0.03 if self.dtype == "bfloat16" else 0.01


@dataclass(frozen=True)
class Rig:
    """A running server with its engine."""

    case: Case
    folder: Path
    server: SglangServer
    engine: SglangEngine
    staging: Staging

    def run(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, Receipt | Refusal]]:
        """Sends samples as one group and gives each answer with its sample."""
        by_id = {sample.id: sample for sample in samples}
        self.engine.submit([Request(one.id, one.input_ids) for one in samples])
        for answer in self.engine.answers():
            if isinstance(answer, GroupDone):
                return
            yield by_id.pop(answer.id), answer

    def rows(self, sample: Sample, answer: Answer) -> dict[str, Tensor] | Wrong:
        """What the collector makes of an answer."""
        assert isinstance(answer, Receipt), answer
        return collect(
            answer,
            sample,
            staging=self.staging,
            taps=TAPS,
            hidden_size=HIDDEN,
            timeout_seconds=0.0,  # a receipt is handed on when its file is whole
        )

    def probe(self) -> list[str]:
        """Runs the start-up probes, as the extract stage does; what each of them showed."""
        return run_probes(
            self.engine,
            make_probes(range(6, 300), chunked_prefill_tokens=self.case.chunk, longest=LONGEST),
            staging=self.staging,
            taps=TAPS,
            hidden_size=HIDDEN,
            log=self.server.log,
            say=lambda _line: None,
        )

    def writers(self) -> int:
        """Processes that have written requests."""
        said = self.staging.folder.glob(".counters-*.json")
        return sum(json.loads(path.read_text())["requests"] > 0 for path in said)


@contextmanager
def capturing(case: Case, folder: Path) -> Iterator[Rig]:
    """A server of that case with the plugin on."""
    target = folder / "target"
    TARGETS[case.target](target)
    staging = Staging(
        folder / "staging", quota_bytes=case.quota_requests * (LONGEST * ROW_BYTES + 8192)
    )
    staging.folder.mkdir()
    told = {
        "staging": str(staging.folder), "quota_bytes": staging.quota_bytes, "taps": list(TAPS),
        "rid_prefix": PREFIX, "ring_bytes": 1 << 20, "writer_threads": 2, "timeout_seconds": 60.0,
    }  # fmt: skip
    (folder / "capture.json").write_text(json.dumps(told))
    flags = server_flags(
        model=str(target),
        device=case.device,
        tensor_parallel=case.tensor_parallel,
        memory_fraction=0.3,
        chunked_prefill_tokens=case.chunk,
        max_running_requests=16,
        cache_tokens=8192,
        dtype=case.dtype,
        radix_cache=case.radix_cache,
        extra_arguments=case.flags,
    )
    extra = server_environment(
        device=case.device,
        tensor_parallel=case.tensor_parallel,
        cores=2,
        nccl={},
        capture=str(folder / "capture.json"),
    )
    with (
        SglangServer(
            flags,
            python=case.python,
            environment=child_environment(
                stage_environment(threads=1, gpus=case.gpus, extra=extra)
            ),
            log=folder / "server.log",
            startup_timeout_seconds=300,
            say=lambda _line: None,
        ) as server,
        SglangEngine(
            server,
            staging,
            rid_prefix=PREFIX,
            concurrency=16,
            timeout_seconds=60,
            vocabulary_size=VOCABULARY,
        ) as engine,
    ):
        yield Rig(case, target, server, engine, staging)


def make_samples(count: int, *, seed: int = 5) -> list[Sample]:
    """Prompts of 1 to LONGEST random tokens, every second one sharing a beginning."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        length = 1 + (number * 61) % LONGEST
        ids = torch.randint(6, VOCABULARY, (length,), generator=generator, dtype=torch.int32)
        if number % 2:
            shared = min(length, 100)
            ids[:shared] = torch.arange(6, 6 + shared, dtype=torch.int32)
        samples.append(Sample(f"s-{number}", ids, torch.ones(length, dtype=torch.bool), "train"))
    return samples


def reference(folder: Path, samples: Sequence[Sample]) -> dict[str, list[Tensor]]:
    """Per sample, the taps and the final state [n, H] each, by transformers in float32."""
    model = load_target(folder, dtype=torch.float32, device="cpu")
    found = {}
    with torch.inference_mode():
        for sample in samples:
            output = model(input_ids=sample.input_ids.long()[None], output_hidden_states=True)
            states = output.hidden_states
            found[sample.id] = [*(states[tap][0] for tap in TAPS), states[-1][0]]
    return found


def difference(found: Tensor, wanted: Tensor) -> float:
    """Relative difference of two states [n, H], by their norms."""
    return float((found.float() - wanted).norm() / wanted.norm())
