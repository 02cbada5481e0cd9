"""Command line, environment and log of the server: pure functions."""

from collections.abc import Sequence

import pytest

from pipeline.capture.errors import CaptureError
from pipeline.capture.sglang_flags import server_environment, server_flags, wrong_flags
from pipeline.capture.sglang_log import is_port_taken, last_line, root_cause


def flags(*, device: str = "cuda", extra: Sequence[str] = (), chunk: int = 8192) -> list[str]:
    return server_flags(
        model="/models/a b",
        device=device,  # type: ignore[arg-type]
        tensor_parallel=8,
        memory_fraction=0.85,
        chunked_prefill_tokens=chunk,
        max_running_requests=32,
        extra_arguments=extra,
    )


def test_a_capture_turns_prefix_cache_and_graphs_off() -> None:
    found = flags()
    assert {"--disable-radix-cache", "--disable-cuda-graph"} <= set(found)
    assert found[found.index("--model-path") + 1] == "/models/a b"
    assert found[found.index("--tp-size") + 1] == "8"
    assert "--attention-backend" not in found


def test_the_cpu_s_own_flags_give_way_to_the_user_s() -> None:
    found = flags(device="cpu", extra=("--attention-backend=intel_amx",))
    assert "torch_native" not in found
    assert found.count("--sampling-backend") == 1


@pytest.mark.parametrize(
    "extra",
    [
        ("--disable-radix-cache",),
        ("--tp-size=2",),
        ("--port", "1"),
        ("--api-key", "x"),
        ("--disable-rad",),  # argparse takes a beginning for the whole
        ("--tp", "2"),
    ],
)
def test_an_argument_that_is_set_already_is_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(CaptureError, match=f"repeats {extra[0].partition('=')[0]}"):
        flags(extra=extra)


@pytest.mark.parametrize(
    ("ranks", "cores", "bind"),
    [(1, 2, None), (2, 2, "0|1"), (2, 8, "0-3|4-7"), (4, 2, "0|1|0|1")],
)
def test_ranks_on_the_cpu_share_its_cores(ranks: int, cores: int, bind: str | None) -> None:
    found = server_environment(device="cpu", tensor_parallel=ranks, cores=cores, nccl={})
    assert found.get("SGLANG_CPU_OMP_THREADS_BIND") == bind
    assert found["SGLANG_USE_CPU_ENGINE"] == "1"


def test_a_server_with_gpus_gets_nccl_settings_alone() -> None:
    found = server_environment(
        device="cuda", tensor_parallel=8, cores=64, nccl={"NCCL_PROTO": "LL"}, capture="/c.json"
    )
    assert found == {"NCCL_PROTO": "LL", "CLEANSLATE_CAPTURE": "/c.json"}


GOOD = {
    "version": "0.5.23", "disable_radix_cache": True, "disable_cuda_graph": True, "device": "cuda",
    "chunked_prefill_size": 64, "pp_size": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"version": "0.5.16"}, "SGLang 0.5.16"),
        ({"disable_radix_cache": False}, "--disable-radix-cache"),
        ({"disable_cuda_graph": False}, "--disable-cuda-graph"),
        ({"chunked_prefill_size": 128}, "--chunked-prefill-size"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_mixed_chunk": True, "speculative_algorithm": "EAGLE3"}, "--enable-mixed-chunk"),
    ],
)
def test_a_running_flag_that_loses_rows_is_named(change: dict[str, object], names: str) -> None:
    assert wrong_flags(GOOD, chunked_prefill_tokens=64) == []
    [problem] = wrong_flags(GOOD | change, chunked_prefill_tokens=64)
    assert names in problem


@pytest.mark.parametrize(
    "said", [{"dp_size": 2, "enable_dp_attention": True}, {"dp_size": 1, "attn_dp_size": 2}]
)
def test_groups_of_dp_attention_share_a_chunk(said: dict[str, object]) -> None:
    shared = GOOD | {"chunked_prefill_size": 32}
    assert wrong_flags(shared | said, chunked_prefill_tokens=64) == []
    [problem] = wrong_flags(shared | {"dp_size": 2}, chunked_prefill_tokens=64)
    assert "--chunked-prefill-size is 32, not 64" in problem


@pytest.mark.parametrize("chunk", [-1, None])
def test_no_chunks_may_be_told_in_two_ways(chunk: int | None) -> None:
    assert wrong_flags(GOOD | {"chunked_prefill_size": chunk}, chunked_prefill_tokens=-1) == []


HARMLESS = """\
[2026-11-29 16:45:29] warm-up failed
Traceback (most recent call last):
  File "connection.py", line 95, in create
    sock.connect(sa)
ConnectionRefusedError: [Errno 111] Connection refused

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "adapters.py", line 729, in send
    raise ConnectionError(e)
requests.exceptions.ConnectionError: Connection refused
[2026-11-29 16:45:29] The server is fired up and ready to roll!
"""
RANK = """\
[2026-11-29 16:45:30 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 6368, in run_scheduler_process
    scheduler.run_event_loop()
IndexError: index out of range in self
[2026-11-29 16:45:30] SIGQUIT received. It usually means one child failed.
[2026-11-29 16:45:31 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "gloo.py", line 1, in wait
RuntimeError: Connection closed by peer
"""


def test_the_cause_is_the_traceback_of_the_rank_that_failed_first() -> None:
    assert root_cause(HARMLESS + RANK)[-1] == "IndexError: index out of range in self"


def test_a_harmless_traceback_is_not_the_cause_of_a_kill() -> None:
    assert root_cause(HARMLESS)[-1].endswith("ready to roll!")


def test_the_last_of_a_chain_is_shown_when_the_start_fails() -> None:
    text = "Traceback (most recent call last):\n  File\nKeyError: 'a'\n\nDuring ...\n\n"
    text += "Traceback (most recent call last):\n  File\nValueError: unknown model\n"
    assert root_cause(text)[-1] == "ValueError: unknown model"


def test_a_log_without_any_traceback_gives_its_last_lines() -> None:
    assert root_cause("a\n\nb\n") == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", "(nothing written yet)"),
        ("[2026-11-29 16:45:29] Load weight begin.\n\n", "Load weight begin."),
        ("shards: 10%\rshards: 50%\r", "shards: 50%"),
        ("[2026-11-29 16:45:29] loading\nx.py:1: UserWarning: old\n  warnings.warn(\n", "loading"),
    ],
)
def test_the_last_line_that_says_something_is_found(text: str, last: str) -> None:
    assert last_line(text) == last


def test_a_taken_port_is_recognised() -> None:
    assert is_port_taken("OSError: [Errno 98] Address already in use")
    assert not is_port_taken("ready")
