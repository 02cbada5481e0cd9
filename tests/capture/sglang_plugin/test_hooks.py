import json
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pipeline.capture.contract import ids_digest
from pipeline.capture.sglang_plugin import hooks
from pipeline.capture.sglang_plugin.configuration import (
    SUPPORTED_SGLANG,
    CaptureConfiguration,
    PluginError,
    check_version,
)
from pipeline.capture.sglang_plugin.hooks import RECEIPT, Capture, find_decoder
from pipeline.capture.stand_in import prefix_states

H, TAPS = 4, (1, 2, 3)


@dataclass
class Request:
    """As much of SGLang's request as the plugin reads."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)


@dataclass
class Faults:
    """What the stand-in server does wrong."""

    packed: bool = False
    no_aux: bool = False
    fewer_taps: bool = False
    short_final: bool = False
    padding: int = 0
    other_id_at: int | None = None
    nan_at: int | None = None


class Output:
    def __init__(self) -> None:
        self.customized_info: dict[str, list[Any]] | None = None


class Server:
    """Runs forward batches as SGLang does, with states that depend on every token before."""

    def __init__(self, folder: Path, *, quota: int = 1 << 24, ring: int = 1 << 16, **told: Any):
        self.folder = folder
        self.capture = Capture(
            CaptureConfiguration(folder, quota, TAPS, "cs-", ring, 2, told.get("timeout", 5.0)),
            sglang="0.5.23",
            plugin="1.2.3",
        )
        self.capture.start(
            device=torch.device("cpu"),
            rank={"tp": 0, "dp": 0, "pid": 7},
            writes=told.get("writes", True),
            padded=told.get("padded", False),
        )

    def forward(
        self,
        parts: Sequence[tuple[Request, int, int]],
        faults: Faults | None = None,
        *,
        extend: bool = True,
        verify: bool = False,
        drafts: bool = False,
    ) -> list[Any]:
        """One forward over rows [prefix, prefix + n) of each request; gives the receipts."""
        faults = faults or Faults()
        ids: list[int] = []
        states: list[torch.Tensor] = []
        for request, prefix, n in parts:
            sequence = request.origin_input_ids + request.output_ids
            whole = prefix_states(torch.tensor(sequence), hidden_size=H, channels=4)
            ids += sequence[prefix : prefix + n]
            states.append(whole[:, prefix : prefix + n])
        rows = torch.cat(states, dim=1)
        if faults.padding:
            rows = torch.cat([rows, torch.full((4, faults.padding, H), 7.0).bfloat16()], dim=1)
            ids += [0] * faults.padding
        if faults.other_id_at is not None:
            ids[faults.other_id_at] += 1
        if faults.nan_at is not None:
            rows = rows.clone()
            rows[2, faults.nan_at, 1] = float("nan")
        aux: Any = [rows[0].clone(), rows[1].clone(), rows[2].clone()][
            : 2 if faults.fewer_taps else 3
        ]
        if faults.packed:
            aux = torch.cat(aux, dim=-1)
        final = rows[3][:-1] if faults.short_final else rows[3]
        output = Output()

        def forward(_worker: Any, _batch: Any) -> Any:
            self.capture.around_logits(
                lambda *_a, **_k: output,
                None,
                torch.tensor(ids),
                final,
                None,
                None,
                None if faults.no_aux else aux,
            )
            return types.SimpleNamespace(logits_output=output)

        mode = types.SimpleNamespace(is_extend=lambda: extend, is_target_verify=lambda: verify)
        batch = types.SimpleNamespace(
            forward_mode=mode,
            reqs=[request for request, _, _ in parts],
            prefix_lens=[prefix for _, prefix, _ in parts],
            extend_lens=[n for _, _, n in parts],
        )
        worker = types.SimpleNamespace(is_draft_worker=drafts)
        self.capture.around_forward(forward, worker, batch)
        info = output.customized_info
        return info[RECEIPT] if info else []

    def whole(self, request: Request) -> bool:
        """Whether the request's file is there and has exactly the rows of the whole prompt."""
        self.capture.stop()
        path = self.folder / f"{request.rid}.safetensors"
        if not path.exists():
            return False
        found = load_file(path)
        ids = torch.tensor(request.origin_input_ids)
        wanted = prefix_states(ids, hidden_size=H, channels=4)
        assert found["input_ids"].tolist() == request.origin_input_ids
        return all(
            torch.equal(found[name], state)
            for name, state in zip(("tap_0", "tap_1", "tap_2", "final"), wanted, strict=True)
        )


def prompt(n: int, seed: int = 0, rid: str = "cs-s0-0") -> Request:
    return Request(rid, [(31 * at + 17 * seed + 3) % 211 for at in range(n)])


def test_a_whole_prompt_gives_its_receipt_and_file(tmp_path: Path) -> None:
    server, request = Server(tmp_path), prompt(5)
    (receipt,) = server.forward([(request, 0, 5)])
    assert receipt == {
        "rid": "cs-s0-0",
        "ok": True,
        "reason": None,
        "detail": None,
        "rows": 5,
        "spans": [[0, 5]],
        "ids_sha256": ids_digest(torch.tensor(request.origin_input_ids)),
        "dtype": "bfloat16",
        "file": "cs-s0-0.safetensors",
        "taps": [1, 2, 3],
        "rank": {"tp": 0, "dp": 0, "pid": 7},
        "plugin": "1.2.3",
        "sglang": "0.5.23",
    }
    assert server.whole(request)


@pytest.mark.parametrize("packed", [False, True])
def test_packed_and_listed_states_give_the_same_file(tmp_path: Path, packed: bool) -> None:
    server, request = Server(tmp_path), prompt(9)
    server.forward([(request, 0, 9)], Faults(packed=packed))
    assert server.whole(request)


def test_chunks_are_joined_and_only_the_last_has_a_receipt(tmp_path: Path) -> None:
    server, request = Server(tmp_path), prompt(10)
    assert server.forward([(request, 0, 4)]) == [None]
    assert server.forward([(request, 4, 4)]) == [None]
    (receipt,) = server.forward([(request, 8, 2)])
    assert receipt["spans"] == [[0, 4], [4, 8], [8, 10]]
    assert server.whole(request)


def test_mixed_batches_keep_their_slots(tmp_path: Path) -> None:
    server = Server(tmp_path)
    decoding = Request("cs-s9-0", [1, 2, 3], [4, 5])
    foreign, own = prompt(3, rid="HEALTH_CHECK_1"), prompt(6, 1)
    receipts = server.forward([(foreign, 0, 3), (own, 0, 6), (decoding, 4, 1)])
    assert [receipt and receipt["ok"] for receipt in receipts] == [None, True, None]
    assert server.whole(own)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["cs-s0-0.safetensors"]


def test_a_pure_decode_batch_is_left_alone(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.forward([(Request("cs-s1-0", [1, 2], [3]), 2, 1)], extend=False) == []


def refusal(server: Server, receipts: list[Any]) -> tuple[str, str]:
    server.capture.stop()
    (receipt,) = receipts
    assert receipt["ok"] is False
    assert not list(server.folder.glob("*.safetensors*"))
    assert not [path for path in server.folder.iterdir() if "safetensors" in path.name]
    return receipt["reason"], receipt["detail"]


@pytest.mark.parametrize("what", ["verify", "drafts"])
def test_passes_of_a_drafter_are_left_alone(tmp_path: Path, what: str) -> None:
    server = Server(tmp_path)
    assert server.forward([(prompt(5), 0, 5)], **{what: True}) == []
    assert list(tmp_path.glob("*safetensors*")) == []


def test_a_request_that_lost_a_span_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    server, request = Server(tmp_path), prompt(8)
    server.forward([(request, 0, 4)])
    server.capture._requests._open[request.rid].spans.clear()
    (receipt,) = server.forward([(request, 4, 4)])
    assert (receipt["ok"], receipt["reason"]) == (False, "row_count")
    assert receipt["detail"] == "4 rows for 8 tokens"
    server.capture.stop()
    assert list(tmp_path.glob("*safetensors*")) == []


def test_taps_beyond_the_model_are_refused(tmp_path: Path) -> None:
    decoder = types.SimpleNamespace(
        layers=[0, 1, 2], layers_to_capture=[], set_eagle3_layers_to_capture=lambda _ids: None
    )
    runner = types.SimpleNamespace(is_draft_worker=False, model=decoder, device="cpu")
    with pytest.raises(PluginError, match=r"taps \[1, 2, 3\]; wanted layers under 3"):
        Server(tmp_path).capture.after_backends(None, runner)


def test_another_sglang_gets_no_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEANSLATE_CAPTURE", str(tmp_path / "capture.json"))
    monkeypatch.setattr(hooks, "version", lambda _name: "0.5.24")
    with pytest.raises(PluginError, match=r"SGLang 0\.5\.24; wanted one of 0\.5\.17"):
        hooks.register()


def test_rows_from_the_prefix_cache_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path)
    receipts = server.forward([(prompt(10), 6, 4)])
    assert refusal(server, receipts) == ("prefix_cache", "rows [0, 6) came from the cache")


def test_a_gap_between_chunks_is_refused(tmp_path: Path) -> None:
    server, request = Server(tmp_path), prompt(10)
    server.forward([(request, 0, 4)])
    receipts = server.forward([(request, 5, 5)])
    assert refusal(server, receipts) == ("prefix_cache", "rows [4, 5) came from the cache")


def test_rows_that_run_again_are_refused(tmp_path: Path) -> None:
    server, request = Server(tmp_path), prompt(10)
    server.forward([(request, 0, 4)])
    receipts = server.forward([(request, 3, 7)])
    assert refusal(server, receipts) == ("row_count", "row 3 ran again, wanted row 4")


def test_a_refused_chunk_refuses_the_whole_request(tmp_path: Path) -> None:
    server, request = Server(tmp_path), prompt(10)
    server.forward([(request, 2, 4)])
    receipts = server.forward([(request, 6, 4)])
    assert refusal(server, receipts)[0] == "prefix_cache"


def test_a_request_prefilled_again_after_it_wrote_is_refused(tmp_path: Path) -> None:
    server, request = Server(tmp_path), prompt(6)
    request.output_ids = [9, 9]
    receipts = server.forward([(request, 0, 8)])
    assert refusal(server, receipts)[0] == "retracted"


def test_states_missing_from_the_forward_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert refusal(server, server.forward([(prompt(6), 0, 6)], Faults(no_aux=True))) == (
        "no_states",
        "the forward gave no states (CUDA graphs on?)",
    )


@pytest.mark.parametrize("packed", [False, True])
def test_another_number_of_taps_is_refused(tmp_path: Path, packed: bool) -> None:
    server = Server(tmp_path)
    faults = Faults(fewer_taps=True, packed=packed)
    assert refusal(server, server.forward([(prompt(6), 0, 6)], faults))[0] == "no_states"


def test_final_rows_missing_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path)
    receipts = server.forward([(prompt(6), 0, 6)], Faults(short_final=True))
    assert refusal(server, receipts) == ("row_count", "[5, 6] rows for 6 tokens")


def test_more_rows_than_tokens_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path)
    receipts = server.forward([(prompt(6), 0, 6)], Faults(padding=2))
    assert refusal(server, receipts) == ("row_count", "[8] rows for 6 tokens")


def test_padding_behind_the_rows_is_known_under_dp_attention(tmp_path: Path) -> None:
    server, request = Server(tmp_path, padded=True), prompt(6)
    (receipt,) = server.forward([(request, 0, 6)], Faults(padding=2))
    assert receipt["ok"]
    assert server.whole(request)


@pytest.mark.parametrize(
    ("faults", "reason"), [(Faults(other_id_at=3), "other_ids"), (Faults(nan_at=3), "not_finite")]
)
def test_what_only_the_writer_can_see_fails_in_the_receipt_or_after_it(
    tmp_path: Path, faults: Faults, reason: str
) -> None:
    server = Server(tmp_path)
    (receipt,) = server.forward([(prompt(6), 0, 6)], faults)
    server.capture.stop()
    if receipt["ok"]:
        receipt = json.loads((tmp_path / "cs-s0-0.failed").read_text())
    assert receipt["reason"] == reason
    assert "row 3" in receipt["detail"]
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_request_beyond_the_quota_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, quota=1000)
    assert refusal(server, server.forward([(prompt(6), 0, 6)]))[0] == "io"


def test_no_room_in_the_ring_in_time_is_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "left.safetensors").write_bytes(bytes(90_000))
    server = Server(tmp_path, quota=100_000, ring=4096, timeout=0.05)
    receipts = [server.forward([(prompt(200, n, f"cs-s{n}-0"), 0, 200)])[0] for n in range(8)]
    server.capture.stop()
    assert not all(receipt["ok"] for receipt in receipts)
    for receipt in receipts:
        failed = tmp_path / f"{receipt['rid']}.failed"
        assert receipt["reason"] == "io" or failed.exists()
        assert not (tmp_path / receipt["file"]).exists()


def test_a_request_whose_next_chunk_never_comes_gives_its_room_back(tmp_path: Path) -> None:
    server = Server(tmp_path, timeout=0.3)
    server.forward([(prompt(10), 0, 4)])
    wait_until(lambda: bool(list(tmp_path.glob(".cs-s0*"))))
    time.sleep(0.4)
    other = prompt(3, 1, "cs-s1-0")
    server.forward([(other, 0, 3)])
    wait_until(lambda: not list(tmp_path.glob(".cs-s0*")))
    assert server.whole(other)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_rank_that_does_not_write_gives_empty_slots(tmp_path: Path) -> None:
    server = Server(tmp_path, writes=False)
    assert server.forward([(prompt(4), 0, 4)]) == [None]
    assert list(tmp_path.iterdir()) == []


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int, int]]]]:
    """Prompt lengths, and batches of (prompt, prefix, rows): chunked, mixed, some restarted."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    done = [0] * len(lengths)
    restarts = [draw(st.integers(0, 1)) for _ in lengths]
    batches = []
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        batch = []
        for k in draw(st.permutations(range(len(lengths)))):
            if done[k] == lengths[k] or (len(lengths) > 1 and draw(st.booleans())):
                continue
            if done[k] and restarts[k] and draw(st.booleans()):
                restarts[k] -= 1
                done[k] = 0
            rows = draw(st.integers(1, lengths[k] - done[k]))
            batch.append((k, done[k], rows))
            done[k] += rows
        if batch:
            batches.append(batch)
    return lengths, batches


@settings(max_examples=60)
@given(schedules(), st.sampled_from([1 << 10, 1 << 14]), st.booleans())
def test_any_chunking_and_restart_gives_the_rows_of_the_whole(
    schedule: tuple[list[int], list[list[tuple[int, int, int]]]], ring: int, packed: bool
) -> None:
    lengths, batches = schedule
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), ring=ring)
        requests = [prompt(n, k, f"cs-s{k}-0") for k, n in enumerate(lengths)]
        receipts = [
            receipt
            for batch in batches
            for receipt in server.forward(
                [(requests[k], prefix, rows) for k, prefix, rows in batch], Faults(packed=packed)
            )
            if receipt is not None
        ]
        assert sorted(receipt["rid"] for receipt in receipts) == sorted(r.rid for r in requests)
        assert all(receipt["ok"] for receipt in receipts)
        assert all(server.whole(request) for request in requests)
        assert len(list(Path(folder).glob("*.safetensors"))) == len(lengths)
        left = [path for path in Path(folder).iterdir() if ".partial" in path.name]
        assert left == []


def test_the_decoder_is_found_through_its_wrappers() -> None:
    decoder = types.SimpleNamespace(layers_to_capture=[])
    nested = types.SimpleNamespace(language_model=types.SimpleNamespace(model=decoder))
    assert find_decoder(nested) is decoder


def test_a_model_without_capture_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match="SimpleNamespace has no layers_to_capture"):
        find_decoder(types.SimpleNamespace(model=types.SimpleNamespace()))


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20", "0.5.23"])
def test_supported_versions_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.5.17.post1", "0.6.0"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(PluginError, match=rf"SGLang {version}; wanted one of 0\.5\.17, "):
        check_version(version)


def test_seven_versions_are_supported() -> None:
    assert len(SUPPORTED_SGLANG) == 7


GOOD = {
    "staging": ".",
    "quota_bytes": 10,
    "taps": [1, 2],
    "rid_prefix": "cs-",
    "ring_bytes": 10,
    "writer_threads": 1,
    "timeout_seconds": 1.0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"taps": [2, 1]}, "strictly rising"),
        ({"taps": []}, "strictly rising"),
        ({"rid_prefix": ""}, "rid_prefix is empty"),
        ({"ring_bytes": 0}, "ring_bytes is 0"),
        ({"staging": "/nowhere/at/all"}, "is no folder"),
        ({"colour": 1}, "wanted exactly"),
    ],
)
def test_an_impossible_configuration_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "capture.json"
    file.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(PluginError, match=message):
        CaptureConfiguration.read(file)


def test_without_its_variable_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEANSLATE_CAPTURE", raising=False)
    hooks.register()
