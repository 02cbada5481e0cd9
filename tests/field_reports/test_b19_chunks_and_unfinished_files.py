"""B19: all chunks of a prompt arrive, and a file is read when it is whole, however it is written.

The real server's side: tests/sglang/test_capture.py; the plugin's: tests/capture/sglang_plugin.
"""

from pathlib import Path

import pytest

from pipeline.store.reader import StateDataset

from .states_fixtures import Job, assert_every_row_is_right, prepared, served, tiny_target

__all__ = ["prepared", "tiny_target"]

FORTY = "s-0000003"  # 40 tokens: chunks of 16, 16 and 8
HALVES, GROWING, EMPTY, LATE, DEAD = (FORTY, *(f"s-{n:07d}" for n in (0, 1, 2, 4)))


def test_every_row_of_every_chunk_arrives_however_the_files_are_written(
    prepared: Job, tmp_path: Path
) -> None:
    files = {HALVES: "halves", GROWING: "growing", EMPTY: "empty_first", LATE: "late"}
    job = served(prepared, tmp_path, files=files)
    said = job.good("extract", "extract.server.request_timeout_seconds=60")
    assert "prompt longer than a chunk: 25 rows in 2 spans, whole" in said
    assert "6 samples kept, 0 left out" in said
    assert "trying it alone" not in said
    assert len(assert_every_row_is_right(job)) == 6
    lengths = {e.id: e.length for e in StateDataset.open(job.folder / "extract").entries}
    assert lengths[FORTY] == 40


def test_a_writer_that_dies_half_way_costs_its_sample_alone_and_is_counted(
    prepared: Job, tmp_path: Path
) -> None:
    job = served(prepared, tmp_path, files={DEAD: "dies"})
    error = job.refused("extract")
    assert "5 of 6 samples captured; left out: {'timeout': 1}" in error
    said = job.good("extract", "--resume", "extract.least_kept_share=0.8")
    assert "5 samples kept, 1 left out" in said
    kept = assert_every_row_is_right(job)
    assert len(kept) == 5
    assert DEAD not in kept
    assert not (tmp_path / "staging").exists() or not list((tmp_path / "staging").rglob("*tensors"))


def test_a_server_that_keeps_the_last_chunk_only_is_refused_before_the_first_sample(
    prepared: Job, tmp_path: Path
) -> None:
    job = served(prepared, tmp_path, last_chunk=True)
    error = job.refused("extract")
    assert "engine returned 16 rows, wanted 48" in error
    assert not list((job.folder / "extract").glob("states-*"))


@pytest.mark.parametrize("chunk", [48, 64])
def test_another_chunk_than_asked_for_is_seen_in_the_server_s_own_flags(
    prepared: Job, tmp_path: Path, chunk: int
) -> None:
    job = served(prepared, tmp_path, flags={"chunked_prefill_size": chunk})
    assert f"--chunked-prefill-size is {chunk}, not 16" in job.refused("extract")
