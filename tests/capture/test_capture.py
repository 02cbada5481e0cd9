from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from pipeline.capture.collector import check_receipt
from pipeline.capture.contract import Receipt, Request, ids_digest
from pipeline.capture.drive import CapturePlan, capture_states
from pipeline.capture.errors import CaptureError
from pipeline.capture.plan import plan_batches, plan_shards
from pipeline.capture.staging import Staging
from pipeline.capture.stand_in import StandIn, StandInFaults, prefix_states
from pipeline.stages.extract import greatest_difference
from pipeline.store.index import Entry, Sample
from pipeline.store.layout import row_bytes, state_fields
from pipeline.store.reader import DatasetFacts, PreparedSamples, StateDataset
from pipeline.store.writer import SampleWriter, to_sample

HIDDEN, TAPS = 6, (1, 2, 3)
ROW_BYTES = row_bytes(state_fields(HIDDEN, taps=3))


def prepare(folder: Path, lengths: list[int], *, shared_prefix: int = 0) -> PreparedSamples:
    folder.mkdir()
    writer = SampleWriter(folder, shard_tokens=1000)
    for number, length in enumerate(lengths):
        own = [100 * number + 7 + at for at in range(length)]
        ids = [*range(min(shared_prefix, length)), *own[min(shared_prefix, length) :]]
        mask = [at >= length // 2 for at in range(length)]
        writer.add(to_sample(f"s{number}", ids, supervised=mask, split="train"))
    writer.flush()
    return PreparedSamples.open(folder)


class Result:
    def __init__(self, dataset: StateDataset, said: list[str], rows: int) -> None:
        self.dataset, self.said, self.rows = dataset, said, rows


def run(
    tmp_path: Path,
    lengths: list[int],
    *,
    faults: StandInFaults | None = None,
    shared_prefix: int = 0,
    shard_rows: int = 40,
    quota_bytes: int = 1 << 20,
    file_timeout: float = 5.0,
) -> Result:
    samples = prepare(tmp_path / "prepared", lengths, shared_prefix=shared_prefix)
    out, staged = tmp_path / "states", tmp_path / "staging"
    out.mkdir()
    staged.mkdir()
    staging = Staging(staged, quota_bytes=quota_bytes)
    shards = plan_shards(samples.entries, row_bytes=ROW_BYTES, shard_bytes=shard_rows * ROW_BYTES)
    said: list[str] = []
    rows: list[int] = []
    capture_states(
        StandIn(staging, hidden_size=HIDDEN, taps=TAPS, faults=faults),
        samples,
        plan=CapturePlan(shards, TAPS, HIDDEN, 32, frozenset(), lambda *_: 0.0, file_timeout),
        finished=frozenset(),
        folder=out,
        staging=staging,
        advance=rows.append,
        say=said.append,
    )
    assert list(staged.glob("*.safetensors")) == []
    DatasetFacts(HIDDEN, TAPS, "f", len(shards)).write(out)
    return Result(StateDataset.open(out), said, sum(rows))


def assert_every_row_is_right(dataset: StateDataset) -> None:
    for entry in dataset.entries:
        states = dataset.read(entry)
        wanted = prefix_states(states.input_ids, hidden_size=HIDDEN, channels=4)
        assert torch.equal(torch.stack([*states.taps, states.final]), wanted)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    reorder=st.booleans(),
    chunk=st.integers(0, 7),
)
def test_every_row_of_every_sample_is_kept_once(
    lengths: list[int], reorder: bool, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    faults = StandInFaults(reorder=reorder, chunk_rows=chunk)
    result = run(tmp_path_factory.mktemp("run"), lengths, faults=faults)
    assert [entry.id for entry in result.dataset.entries] == [f"s{n}" for n in range(len(lengths))]
    assert result.rows == sum(lengths)
    assert_every_row_is_right(result.dataset)


@pytest.mark.parametrize(
    ("faults", "bad", "reason"),
    [
        (StandInFaults(chunk_rows=4, last_chunk_only=True), {"s0", "s1", "s2"}, "row_count"),
        (StandInFaults(refuse=frozenset({"s1"})), {"s1"}, "told_to"),
        (StandInFaults(silent=frozenset({"s1"})), {"s1"}, "no_answer"),
        (StandInFaults(wrong_ids=frozenset({"s1"})), {"s1"}, "other_ids"),
        (StandInFaults(not_finite=frozenset({"s2"})), {"s2"}, "not_finite"),
        (StandInFaults(zero_row=frozenset({"s2"})), {"s2"}, "zero_row"),
        (StandInFaults(dead_writer=frozenset({"s0"})), {"s0"}, "file"),
    ],
)
def test_a_faulty_answer_is_refused_and_counted(
    tmp_path: Path, faults: StandInFaults, bad: set[str], reason: str
) -> None:
    result = run(tmp_path, [9, 10, 11], faults=faults, file_timeout=2.0)
    assert dict(result.dataset.skipped) == dict.fromkeys(sorted(bad), reason)
    assert {entry.id for entry in result.dataset.entries} == {"s0", "s1", "s2"} - bad
    assert_every_row_is_right(result.dataset)


@pytest.mark.parametrize("shared", [8, 12])  # a common beginning; the same conversation twice
def test_a_prefix_cache_is_named(tmp_path: Path, shared: int) -> None:
    faults = StandInFaults(prefix_cache=True)
    result = run(tmp_path, [12, 12, 5], faults=faults, shared_prefix=shared)
    kept = {entry.id for entry in result.dataset.entries}
    assert dict(result.dataset.skipped) == dict.fromkeys({"s0", "s1", "s2"} - kept, "row_count")
    assert len(kept & {"s0", "s1"}) == 1
    assert any("prefix cache on?" in line for line in result.said)
    assert_every_row_is_right(result.dataset)


def test_rows_that_changed_places_do_not_agree_with_the_log_probabilities(tmp_path: Path) -> None:
    samples = prepare(tmp_path / "prepared", [9])
    head = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(3))
    found = {}
    for name, swapped in (("right", frozenset[str]()), ("swapped", frozenset({"s0"}))):
        staging = Staging(tmp_path, quota_bytes=1 << 20)
        engine = StandIn(
            staging,
            hidden_size=HIDDEN,
            taps=TAPS,
            head=head,
            faults=StandInFaults(swap_rows=swapped),
        )
        sample = samples.read(samples.entries[0])
        engine.submit([Request("s0", sample.input_ids, logprobs=True)])
        receipt = next(engine.answers())
        assert isinstance(receipt, Receipt)
        assert check_receipt(receipt, sample, taps=TAPS) is None  # it cannot know
        final = staging.read(receipt.file, timeout_seconds=0)["final"]
        assert receipt.logprobs is not None
        found[name] = greatest_difference(sample, final, receipt.logprobs, head=head)
    assert found["right"] < 0.001
    assert found["swapped"] > 0.25


def test_a_sample_refused_once_is_tried_again_alone_and_kept(tmp_path: Path) -> None:
    result = run(tmp_path, [9, 10, 11], faults=StandInFaults(refuse_once=frozenset({"s1"})))
    assert len(result.dataset.entries) == 3
    assert [line for line in result.said if "trying it alone" in line]


def test_a_file_that_comes_after_its_receipt_is_waited_for(tmp_path: Path) -> None:
    result = run(tmp_path, [9, 10], faults=StandInFaults(late_seconds=0.2))
    assert len(result.dataset.entries) == 2
    assert_every_row_is_right(result.dataset)


def test_a_file_that_grows_under_its_own_name_is_read_when_it_is_whole(tmp_path: Path) -> None:
    staging = Staging(tmp_path, quota_bytes=1 << 20)
    tensor = torch.arange(300, dtype=torch.bfloat16)
    staging.write("whole.safetensors", {"final": tensor}, timeout_seconds=0)
    data = (tmp_path / "whole.safetensors").read_bytes()
    growing = tmp_path / "growing.safetensors"
    for size in (0, 4, 30, len(data) - 1):
        growing.write_bytes(data[:size])
        with pytest.raises(TimeoutError, match=r"growing.safetensors did not become whole"):
            staging.wait("growing.safetensors", timeout_seconds=0)
    growing.write_bytes(data)
    read = staging.read("growing.safetensors", timeout_seconds=0)
    assert torch.equal(read["final"], tensor)


def test_a_file_that_is_no_safetensors_is_not_waited_for(tmp_path: Path) -> None:
    staging = Staging(tmp_path, quota_bytes=1 << 20)
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(SafetensorError):
        staging.read("a.safetensors", timeout_seconds=60)


def test_an_engine_waits_while_the_staging_folder_is_full(tmp_path: Path) -> None:
    import threading

    staging = Staging(tmp_path, quota_bytes=1000)
    tensor = {"final": torch.ones(300, dtype=torch.bfloat16)}  # 600 bytes
    staging.write("a.safetensors", tensor, timeout_seconds=1)
    with pytest.raises(CaptureError, match="no room"):
        staging.write("b.safetensors", tensor, timeout_seconds=0.05)
    threading.Timer(0.2, lambda: staging.free("a.safetensors")).start()
    staging.write("b.safetensors", tensor, timeout_seconds=5)
    assert staging.waiting_bytes() <= 1000


def test_a_sample_larger_than_the_quota_is_an_error_not_a_wait(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="staging_quota_bytes"):
        Staging(tmp_path, quota_bytes=10).write(
            "a.safetensors", {"final": torch.ones(300)}, timeout_seconds=60
        )


@pytest.mark.parametrize("name", ["../x.safetensors", ".hidden", "a/b.safetensors"])
def test_a_staging_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="staging file name"):
        Staging(tmp_path, quota_bytes=10).read(name, timeout_seconds=0)


SAMPLE = Sample("s", torch.arange(5, dtype=torch.int32), torch.ones(5, dtype=torch.bool), "train")


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (((0, 3), (2, 5)), "overlap at row 3"),
        (((0, 2), (3, 5)), "leave a gap at row 2"),
        (((0, 3),), "end at 3, wanted 5"),
        ((), "end at 0, wanted 5"),
        (((0, 0), (0, 5)), "at row 0"),
    ],
)
def test_spans_that_do_not_cover_the_sample_once_are_refused(
    spans: tuple[tuple[int, int], ...], words: str
) -> None:
    receipt = Receipt("s", 5, spans, ids_digest(SAMPLE.input_ids), "bfloat16", TAPS, "f")
    wrong = check_receipt(receipt, SAMPLE, taps=TAPS)
    assert wrong is not None
    assert words in wrong.detail


def test_a_receipt_for_other_ids_is_refused_before_its_file_is_read() -> None:
    other = ids_digest(SAMPLE.input_ids + 1)
    receipt = Receipt("s", 5, ((0, 5),), other, "bfloat16", TAPS, "f")
    wrong = check_receipt(receipt, SAMPLE, taps=TAPS)
    assert wrong is not None
    assert wrong.reason == "other_ids"


@pytest.mark.parametrize("taps", [(1, 2), (0, 1, 2), (3, 2, 1)])
def test_other_layers_than_asked_for_are_refused(taps: tuple[int, ...]) -> None:
    receipt = Receipt("s", 5, ((0, 5),), ids_digest(SAMPLE.input_ids), "bfloat16", taps, "f")
    wrong = check_receipt(receipt, SAMPLE, taps=TAPS)
    assert wrong is not None
    assert wrong.reason == "taps"


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), budget=st.integers(1, 100))
def test_plans_hold_every_sample_once_and_keep_to_their_budget(
    lengths: list[int], budget: int
) -> None:
    entries = [Entry(f"s{n}", "train", "x", 0, length, 1, "") for n, length in enumerate(lengths)]
    shards = plan_shards(entries, row_bytes=1, shard_bytes=budget)
    assert [entry for shard in shards for entry in shard] == entries
    assert all(len(s) == 1 or sum(e.length for e in s) <= budget for s in shards)
    batches = plan_batches(entries, batch_tokens=budget)
    assert sorted(e.id for b in batches for e in b) == sorted(e.id for e in entries)
    assert all(len(b) == 1 or max(e.length for e in b) * len(b) <= budget for b in batches)
