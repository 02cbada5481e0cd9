"""The SGLang server's command line and environment: pure functions of settings.

Sources: SGLang 0.5.23 `srt/server_args.py`; the flags for the CPU were found by running it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipeline.capture.errors import CaptureError
from pipeline.capture.sglang_plugin.configuration import SUPPORTED_SGLANG

SUPPORTED = SUPPORTED_SGLANG
"""Versions of SGLang whose insides the capture plugin knows."""

_CPU_FLAGS = (
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    "--skip-server-warmup",
)
_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_NCCL_SO_PATH": "/none",  # no NCCL: gloo carries the ranks
}


def server_flags(
    *,
    model: str,
    device: Literal["cuda", "cpu"],
    tensor_parallel: int,
    memory_fraction: float,
    chunked_prefill_tokens: int,
    max_running_requests: int,
    cache_tokens: int = 0,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    remote_code: bool = False,
    radix_cache: bool = False,
    cuda_graphs: bool = False,
    extra_arguments: Sequence[str] = (),
) -> list[str]:
    """Arguments of `sglang.launch_server`, one element each; never a shell string.

    model: the target's folder. chunked_prefill_tokens -1: prompts are not split. cache_tokens 0: as
    many as memory allows. CaptureError when an extra argument repeats one that is set here.
    """
    flags = [
        *("--model-path", model),
        *("--device", device),
        *("--dtype", dtype),
        *("--tp-size", str(tensor_parallel)),
        *("--mem-fraction-static", str(memory_fraction)),
        *("--chunked-prefill-size", str(chunked_prefill_tokens)),
        *("--max-running-requests", str(max_running_requests)),
    ]
    if cache_tokens:
        flags += ["--max-total-tokens", str(cache_tokens)]
    if not radix_cache:
        flags.append("--disable-radix-cache")
    if not cuda_graphs:
        flags.append("--disable-cuda-graph")
    if remote_code:
        flags.append("--trust-remote-code")
    given = [argument.partition("=")[0] for argument in extra_arguments if argument[:2] == "--"]
    if device == "cpu":
        flags += _without(_CPU_FLAGS, given)
    own = {"--host", "--port", "--api-key", "--tensor-parallel-size", "--model"}
    own |= {flag for flag in flags if flag[:2] == "--"} - {*_CPU_FLAGS}
    # argparse takes the beginning of a flag for the flag, and of two alike the last counts.
    if repeated := sorted(one for one in {*given} if any(flag.startswith(one) for flag in own)):
        raise CaptureError(
            f"extract.server.extra_arguments repeats {', '.join(repeated)}",
            wanted="arguments that Cleanslate does not set itself",
            next_step="take it out, and use the setting of that meaning (make show)",
        )
    return [*flags, *extra_arguments]


def _without(flags: Sequence[str], given: Sequence[str]) -> list[str]:
    """The flags (with their values) that were not given by the user."""
    kept: list[str] = []
    keep = True
    for flag in flags:
        keep = flag not in given if flag[:2] == "--" else keep
        if keep:
            kept.append(flag)
    return kept


def server_environment(
    *,
    device: Literal["cuda", "cpu"],
    tensor_parallel: int,
    cores: int,
    nccl: Mapping[str, str],
    capture: str | None = None,
) -> dict[str, str]:
    """What the server's processes get on top of a stage's environment.

    cores: CPU cores that ranks on the CPU share. capture: path of the capture plugin's JSON file;
    None: the plugin stays off.
    """
    found = dict(nccl)
    if device == "cpu":
        found |= _CPU_ENVIRONMENT
        if tensor_parallel > 1:  # SGLang wants to be told which rank has which cores
            share = max(cores // tensor_parallel, 1)
            ranges = [
                f"{first}-{first + share - 1}" if share > 1 else str(first)
                for first in (rank * share % cores for rank in range(tensor_parallel))
            ]
            found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(ranges)
    if capture is not None:
        found["CLEANSLATE_CAPTURE"] = capture
    return found


def wrong_flags(info: Mapping[str, Any], *, chunked_prefill_tokens: int) -> list[str]:
    """What of a running server's own flags (`/server_info`) stands against a whole capture.

    One sentence each, naming the flag; empty when all is as it must be.
    """
    problems = []
    version = str(info.get("version"))
    if version not in SUPPORTED:
        problems.append(f"SGLang {version} (the capture knows {SUPPORTED[0]} to {SUPPORTED[-1]})")
    if info.get("disable_radix_cache") is not True:
        problems.append("the prefix cache is on (--disable-radix-cache is missing)")
    if not _graphs_off(info):
        problems.append("CUDA graphs are on (--disable-cuda-graph is missing)")
    chunk = info.get("chunked_prefill_size")
    # Divided among the groups of DP attention, which 0.5.17 counts in dp_size, 0.5.23 in another.
    groups = info.get("attn_dp_size") or (
        info.get("dp_size", 1) if info.get("enable_dp_attention") else 1
    )
    whole = chunk in (None, -1) and chunked_prefill_tokens < 0
    if not whole and chunk not in (chunked_prefill_tokens, chunked_prefill_tokens // groups):
        problems.append(f"--chunked-prefill-size is {chunk}, not {chunked_prefill_tokens}")
    if info.get("enable_mixed_chunk") and info.get("speculative_algorithm"):
        problems.append("--enable-mixed-chunk with speculative decoding")
    if info.get("pp_size", 1) != 1:
        problems.append("--pp-size: pipeline parallel ranks do not hold all layers")
    return problems


def _graphs_off(info: Mapping[str, Any]) -> bool:
    return info.get("disable_cuda_graph") is True or info.get("device") == "cpu"
