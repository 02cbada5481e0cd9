"""One meaning of a layer number: transformers, both engines, and the ids that an export carries.

The fingerprint: every layer of a tiny target changes the stream a lot, so a captured state is near
to one of transformers' hidden_states and far from every other.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.capture.contract import GroupDone, Receipt, Request
from pipeline.capture.sglang_engine import SglangEngine
from pipeline.capture.sglang_generate import Limits, Prompt, generate
from pipeline.capture.staging import Staging
from pipeline.capture.transformers_engine import TransformersEngine
from pipeline.evaluation.sglang_drafter import drafter_flags
from pipeline.target.load import load_target
from tests.sglang.tiny import (
    LAYERS,
    TARGETS,
    VOCABULARY,
    export_random_drafter,
    place_probe,
    spread_layers,
    start_server,
)

IDS = torch.randint(
    6, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1), dtype=torch.int32
)
TAPS = (2, 3, 6)


class Target:
    """A folder, and what transformers itself says enters each layer: states[k] [n, H]."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = load_target(folder, dtype=torch.float32, device="cpu")
        with torch.inference_mode():
            output = model(input_ids=IDS.long()[None], output_hidden_states=True)
        self.states: list[Tensor] = [state[0] for state in output.hidden_states]
        assert len(self.states) == LAYERS + 1

    def layer_of(self, captured: Tensor) -> int:
        """The one layer whose input this is. AssertionError when it is near to none or to two."""
        distances = [
            float((captured.float() - state).norm() / state.norm()) for state in self.states
        ]
        best, second = sorted(distances)[:2]
        assert best < 0.02, distances
        assert second > 0.1, distances
        return distances.index(best)


@pytest.fixture(scope="module", params=list(TARGETS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp(request.param)
    TARGETS[request.param](folder)
    spread_layers(folder)
    return Target(folder)


def staged_layers(target: Target, staging: Staging, receipt: Receipt) -> list[int]:
    tensors = staging.read(receipt.file, timeout_seconds=30.0)
    return [target.layer_of(tensors[f"tap_{number}"]) for number in range(3)]


@pytest.mark.slow
def test_the_fingerprint_tells_every_layer_from_every_other(target: Target) -> None:
    assert [target.layer_of(state) for state in target.states] == list(range(LAYERS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("taps", [TAPS, (0, 1, LAYERS - 1)])
def test_transformers_captures_the_layers_that_the_taps_name(
    target: Target, tmp_path: Path, taps: tuple[int, ...]
) -> None:
    staging = Staging(tmp_path, quota_bytes=1 << 24)
    engine = TransformersEngine(
        target.folder,
        staging,
        taps=taps,
        dtype=torch.float32,
        device="cpu",
        remote_code=False,
    )
    engine.submit([Request("s", IDS)])
    receipt = next(engine.answers())
    assert isinstance(receipt, Receipt)
    assert staged_layers(target, staging, receipt) == list(taps)


@pytest.mark.sglang
def test_the_server_captures_the_layers_that_the_taps_name(target: Target, tmp_path: Path) -> None:
    taps = (1, 4, LAYERS - 1)  # the drafter of the next test has others
    staging = Staging(tmp_path / "staging", quota_bytes=1 << 24)
    staging.folder.mkdir()
    told = {
        "staging": str(staging.folder), "quota_bytes": staging.quota_bytes, "taps": list(taps),
        "rid_prefix": "cs-layers-", "ring_bytes": 1 << 22, "writer_threads": 1,
        "timeout_seconds": 60.0,
    }  # fmt: skip
    configuration = tmp_path / "capture.json"
    configuration.write_text(json.dumps(told))
    with (
        start_server(target.folder, tmp_path, capture=configuration) as server,
        SglangEngine(
            server,
            staging,
            rid_prefix="cs-layers-",
            concurrency=1,
            timeout_seconds=60.0,
            vocabulary_size=VOCABULARY,
        ) as engine,
    ):
        engine.submit([Request("s", IDS)])
        answers = engine.answers()
        receipt = next(answers)
        assert isinstance(receipt, Receipt), receipt
        assert staged_layers(target, staging, receipt) == list(taps)
        assert isinstance(next(answers), GroupDone)


@pytest.mark.sglang
def test_a_drafter_gets_from_the_server_the_layers_that_it_was_trained_on(
    target: Target, tmp_path: Path
) -> None:
    export = tmp_path / "export"
    export_random_drafter(export, target.folder, TAPS)
    environment = place_probe(tmp_path)
    seen = Path(environment["LAYER_PROBE"])
    limits = Limits(max_new_tokens=8, end_ids=frozenset({3}), concurrency=1, timeout_seconds=120.0)
    with start_server(
        target.folder,
        tmp_path,
        flags=drafter_flags(export, draft_tokens=2, device="cpu"),
        environment=environment,
    ) as server:
        list(generate(server, [Prompt("p", tuple(IDS.tolist()))], limits=limits))
    assert json.loads((seen / "layers.json").read_text())["layers"] == list(TAPS)
    prefills = [
        tensors
        for path in sorted(seen.glob("states-*"))
        if torch.equal((tensors := load_file(path))["input_ids"].int(), IDS)
    ]
    assert len(prefills) == 1
    layers = [target.layer_of(prefills[0][f"aux_{number}"]) for number in range(3)]
    assert layers == list(TAPS)
