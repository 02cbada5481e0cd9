"""B02: a prefix cache never takes a row away in silence.

The real server's side: tests/sglang/test_capture.py; the plugin's: tests/capture/sglang_plugin.
"""

from pathlib import Path

import pytest

from .states_fixtures import Job, assert_every_row_is_right, prepared, served, tiny_target

__all__ = ["prepared", "tiny_target"]

ALL = {f"s-{number:07d}" for number in range(6)}
SHARING = {"s-0000004", "s-0000005"}  # a system prompt of 64 tokens and more


def test_without_a_cache_every_row_of_every_conversation_is_kept(
    prepared: Job, tmp_path: Path
) -> None:
    job = served(prepared, tmp_path)
    assert "prompt with a shared prefix: 48 rows in 3 spans, whole" in job.good("extract")
    assert assert_every_row_is_right(job) == ALL


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (
            {"flags": {"disable_radix_cache": False}},
            "the prefix cache is on (--disable-radix-cache is missing)",
        ),
        ({"cache": "told"}, "47 of 48 tokens came from the prefix cache (prefix_cache); at fault"),
        ({"cache": "untold"}, "engine returned 1 rows, wanted 48 (prefix cache on?)"),
    ],
)
def test_a_server_with_its_cache_on_is_refused_before_the_first_sample(
    prepared: Job, tmp_path: Path, faults: dict[str, object], says: str
) -> None:
    job = served(prepared, tmp_path, **faults)
    error = job.refused("extract")
    assert says in error
    assert "--disable-radix-cache" in error
    assert not list((job.folder / "extract").glob("states-*"))


def test_a_sample_that_lost_rows_is_left_out_named_and_counted_and_the_others_are_right(
    prepared: Job, tmp_path: Path
) -> None:
    job = served(prepared, tmp_path, cache="untold", probes=False)
    done = job.run("extract")
    assert done.status == 1
    assert "5 of 6 samples captured; left out: {'row_count': 1}" in done.error
    assert "(prefix cache on?) (row_count); trying it alone" in done.said
    assert "(prefix cache on?) (row_count); left out" in done.said
    said = job.good("extract", "--resume", "extract.least_kept_share=0.8")
    assert "5 samples kept, 1 left out" in said
    kept = assert_every_row_is_right(job)
    assert len(kept & SHARING) == 1
    assert kept | SHARING == ALL


def test_shifted_rows_of_the_right_number_do_not_agree_with_the_log_probabilities(
    prepared: Job, tmp_path: Path
) -> None:
    job = served(prepared, tmp_path, cache="hidden", probes=False)
    error = job.refused("extract", "extract.logprob_samples=6")
    assert "log-probabilities from the stored final states differ by" in error
    assert any(name in error for name in SHARING)
    assert not (job.folder / "extract" / "manifest.json").exists()


@pytest.mark.parametrize(
    "argument",
    ["--disable-radix-cache", "--disable-rad", "--chunked-prefill-size=64", "--chunked", "--tp"],
)
def test_the_server_s_arguments_cannot_be_given_a_second_time(
    prepared: Job, tmp_path: Path, argument: str
) -> None:
    job = served(prepared, tmp_path)
    error = job.refused("extract", f'extract.server.extra_arguments=["{argument}","4"]')
    assert f"extra_arguments repeats {argument.partition('=')[0]}" in error
    assert not job.begun("extract")


def test_the_cache_cannot_be_turned_on(prepared: Job, tmp_path: Path) -> None:
    job = served(prepared, tmp_path)
    assert "radix_cache" in job.refused("extract", "extract.server.radix_cache=true")
    assert not job.begun("extract")
