"""The SGLang server for stages that want answers, not states: its flags and what came of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.capture.sglang_flags import SUPPORTED, server_environment
from pipeline.capture.sglang_server import SglangServer
from pipeline.evaluation.sglang_drafter import drafter_flags, wrong_drafting
from pipeline.settings.environment import child_environment
from pipeline.slate.log import SAY
from pipeline.stages.errors import ServerUnfit, StageError
from pipeline.stages.extract_server import target_flags
from pipeline.stages.run import Run


@dataclass(frozen=True)
class Drafting:
    """The drafter that a server uses: the folder of an export, and drafts of one pass."""

    folder: Path
    draft_tokens: int


@dataclass(frozen=True)
class ServerPlan:
    """How the target is served.

    radix_cache: keep common beginnings of prompts; off where answers are compared, for a kept
    beginning may have been computed in another batch. extra_flags: further arguments, ours.
    """

    dtype: Literal["float32", "bfloat16"]
    gpus: tuple[int, ...]
    radix_cache: bool = False
    drafting: Drafting | None = None
    extra_flags: Sequence[str] = ()


def server_decides(run: Run) -> dict[str, object]:
    """What of the server's settings decides answers."""
    return run.settings.extract.server.model_dump(
        mode="json", include={"device", "tensor_parallel", "extra_arguments"}
    )


def plan_flags(run: Run, plan: ServerPlan) -> list[str]:
    """Arguments of `sglang.launch_server` for a plan.

    CaptureError when extra ones repeat ours; StageError for a precision that GPUs do not serve.
    """
    server = run.settings.extract.server
    if server.device == "cuda" and plan.dtype == "float32":
        raise StageError(
            "compute_dtype is float32 for a server on GPUs, whose kernels (sgl_kernel) lack it",
            wanted="bfloat16",
            next_step="set evaluate.compute_dtype (prepare.answering.compute_dtype for answers)",
        )
    flags = target_flags(
        run,
        dtype=plan.dtype,
        radix_cache=plan.radix_cache,
        cuda_graphs=server.device == "cuda",  # only captures need them off
    )
    if plan.drafting is not None:
        flags += drafter_flags(
            plan.drafting.folder, draft_tokens=plan.drafting.draft_tokens, device=server.device
        )
    return [*flags, *plan.extra_flags]


def plan_environment(run: Run, plan: ServerPlan) -> dict[str, str]:
    """What a plan's server gets on top of what every child inherits."""
    server = run.settings.extract.server
    extra: Mapping[str, str] = server_environment(
        device=server.device,
        tensor_parallel=server.tensor_parallel,
        cores=run.threads,
        nccl=run.nccl("extraction", explicit=server.nccl, gpus=plan.gpus),
    )
    return run.environment(gpus=plan.gpus, extra=extra)


def make_server(run: Run, plan: ServerPlan, *, log: Path, name: str = "server") -> SglangServer:
    """The server of a plan, not started yet: entering it starts it.

    log: of the stage; the server's own is beside it, told apart by `name`.
    """
    server = run.settings.extract.server
    own_log = log.with_name(f"{log.stem}-{name}.log")
    own_log.touch(mode=0o600)  # SGLang writes its arguments there, and with them the API key
    return SglangServer(
        plan_flags(run, plan),
        python=server.python.absolute(),
        environment=child_environment(plan_environment(run, plan)),
        log=own_log,
        startup_timeout_seconds=server.startup_timeout_seconds,
        say=lambda line: SAY.info("%s", line),
    )


def check_running(server: SglangServer, plan: ServerPlan) -> dict[str, object]:
    """The running server's own word on its version and flags. StageError when they are others."""
    info = server.server_info()
    tokens = None if plan.drafting is None else plan.drafting.draft_tokens
    problems = wrong_drafting(info, draft_tokens=tokens, dtype=plan.dtype)
    if info.get("version") not in SUPPORTED:
        problems.append(f"SGLang {info.get('version')} (known: {SUPPORTED[0]} to {SUPPORTED[-1]})")
    if not plan.radix_cache and info.get("disable_radix_cache") is not True:
        problems.append("the prefix cache is on")
    if problems:
        raise ServerUnfit(
            f"the running server: {'; '.join(problems)}",
            wanted="a server that runs with the flags it was given",
            next_step=f"see {server.log} for why it changed them, and extract.server",
        )
    return {"sglang": info["version"], "flags": plan_summary(info)}


def plan_summary(info: Mapping[str, object]) -> dict[str, object]:
    """The flags that matter for a comparison, for the manifest."""
    names = (
        "dtype", "attention_backend", "prefill_attention_backend", "decode_attention_backend",
        "tp_size", "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk",
        "speculative_num_draft_tokens", "disable_overlap_schedule", "disable_radix_cache",
    )  # fmt: skip
    return {name: info.get(name) for name in names}
