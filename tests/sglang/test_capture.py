"""Captures from the real server on a CPU, row by row against transformers."""

import threading
from collections.abc import Iterator

import httpx
import pytest

from pipeline.capture.collector import Wrong
from pipeline.capture.contract import Receipt, Refusal
from pipeline.capture.errors import CaptureError
from pipeline.capture.sglang_flags import wrong_flags
from tests.sglang.capturing import (
    LONGEST,
    Case,
    Rig,
    capturing,
    difference,
    make_samples,
    reference,
)

pytestmark = pytest.mark.sglang

CASES = {
    "llama-16": Case("LlamaForCausalLM", 16),
    "llama-whole": Case("LlamaForCausalLM", -1),
    "llama-mixed": Case("LlamaForCausalLM", 64, flags=("--enable-mixed-chunk",)),
    "llama-two-ranks": Case("LlamaForCausalLM", 64, tensor_parallel=2),
    "deepseek-16": Case("DeepseekV3ForCausalLM", 16, dtype="float32"),
    "deepseek-whole": Case("DeepseekV3ForCausalLM", -1, dtype="float32"),
    "deepseek-two-groups": Case(
        "DeepseekV3ForCausalLM",
        64,
        tensor_parallel=2,
        dtype="float32",
        flags=("--enable-dp-attention", "--dp-size", "2"),
        quota_requests=16,
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=str)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with capturing(CASES[request.param], tmp_path_factory.mktemp("rig")) as running:
        yield running


def test_the_running_server_has_the_flags_it_was_given(rig: Rig) -> None:
    info = rig.server.server_info()
    assert wrong_flags(info, chunked_prefill_tokens=rig.case.chunk) == []


def test_the_probes_come_back_whole(rig: Rig) -> None:
    lines = rig.probe()
    assert len(lines) == (3 if rig.case.chunk < 0 else 4)


def test_every_row_is_that_of_transformers(rig: Rig) -> None:
    samples = make_samples(16)
    wanted = reference(rig.folder, samples)
    for order in (samples, samples[::-1]):  # repeated, and in another order
        kept, chunks = set(), 0
        for sample, answer in rig.run(order):
            rows = rig.rows(sample, answer)
            assert not isinstance(rows, Wrong), rows
            names = ("tap_0", "tap_1", "tap_2", "final")
            found = [difference(rows[n], w) for n, w in zip(names, wanted[sample.id], strict=True)]
            assert max(found) < rig.case.tolerance, (sample.id, found)
            kept.add(sample.id)
            chunks = max(chunks, len(answer.spans) if isinstance(answer, Receipt) else 0)
        assert kept == {sample.id for sample in samples}
        assert (chunks > 1) == (0 < rig.case.chunk < LONGEST)


def test_a_slow_reader_loses_nothing_and_nothing_grows(rig: Rig) -> None:
    samples = make_samples(40, seed=6)
    seen, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(rig.staging.waiting_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for sample, answer in rig.run(samples):
            done.wait(0.03)
            assert not isinstance(rig.rows(sample, answer), Wrong)
    finally:
        done.set()
        watcher.join()
    assert 0 < max(seen) <= rig.staging.quota_bytes
    assert list(rig.staging.folder.glob("*safetensors*")) == []


def test_work_of_others_is_not_captured(rig: Rig) -> None:
    with rig.server.client(timeout_seconds=60) as client:
        reply = client.post(
            "/generate",
            json={"rid": "other-1", "input_ids": [7, 8], "sampling_params": {"max_new_tokens": 1}},
        )
    assert reply.status_code == httpx.codes.OK
    assert not any(reply.json()["meta_info"].get("cleanslate_capture") or [])
    assert list(rig.staging.folder.glob("*safetensors*")) == []


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    case = Case("LlamaForCausalLM", 64, radix_cache=True)
    with capturing(case, tmp_path_factory.mktemp("cached")) as running:
        yield running


def test_a_prefix_cache_is_seen_in_the_server_s_own_flags(cached: Rig) -> None:
    [problem] = wrong_flags(cached.server.server_info(), chunked_prefill_tokens=64)
    assert "--disable-radix-cache" in problem


def test_a_prefix_cache_is_named_by_the_probes(cached: Rig) -> None:
    with pytest.raises(CaptureError, match=r"same prompt again.*at fault: --disable-radix-cache"):
        cached.probe()


def test_a_cached_prefix_is_refused_and_leaves_no_file(cached: Rig) -> None:
    sample = make_samples(3)[2]  # begins unlike the probes
    [(_, first)] = cached.run([sample])
    assert isinstance(first, Receipt)
    cached.staging.free(first.file)
    [(_, second)] = cached.run([sample])
    assert isinstance(second, Refusal)
    assert second.reason == "prefix_cache"
    assert list(cached.staging.folder.glob("*safetensors*")) == []
