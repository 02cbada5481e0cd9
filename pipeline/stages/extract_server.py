"""The extract stage's SGLang server: checked before the wipe, probed before the first sample."""

import json
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pipeline.capture.errors import CaptureError, ServerDied
from pipeline.capture.sglang_engine import SglangEngine
from pipeline.capture.sglang_flags import (
    SUPPORTED,
    server_environment,
    server_flags,
    wrong_flags,
)
from pipeline.capture.sglang_log import lines_about
from pipeline.capture.sglang_plugin.configuration import CaptureConfiguration
from pipeline.capture.sglang_probe import make_probes, run_probes
from pipeline.capture.sglang_server import SglangServer
from pipeline.capture.staging import Staging
from pipeline.settings.environment import child_environment
from pipeline.slate.files import write_json
from pipeline.slate.log import SAY
from pipeline.stages.errors import ServerUnfit, StageError
from pipeline.stages.run import Run
from pipeline.store.reader import PreparedSamples

SERVER_FACTS = "server.json"
CONFIGURATION = "capture.json"
PLUGIN = "pipeline.capture.sglang_plugin.hooks:register"
# SGLang's watchdog ends a scheduler whose forward takes 300 s; the plugin gives up before it.
_MOST_WAIT_SECONDS = 240.0
_QUOTA_REQUESTS = 4
_PROBE_IDS = 4096
_ASK = """
import importlib.metadata as m, json
def of(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({
    "sglang": of("sglang"), "torch": of("torch"), "cleanslate": of("cleanslate"),
    "plugins": [one.value for one in m.entry_points(group="sglang.srt.plugins")]}))
"""


def server_decides(run: Run) -> dict[str, Any]:
    """What of the server's settings decides the states that it gives."""
    names = {"device", "tensor_parallel", "chunked_prefill_tokens", "extra_arguments"}
    return run.settings.extract.server.model_dump(mode="json", include=names)


def flags_of(run: Run) -> list[str]:
    """Arguments of the server that captures. CaptureError when extra ones repeat ours."""
    server = run.settings.extract.server
    return target_flags(
        run, dtype="bfloat16", radix_cache=server.radix_cache, cuda_graphs=server.cuda_graphs
    )


def target_flags(
    run: Run, *, dtype: Literal["float32", "bfloat16"], radix_cache: bool, cuda_graphs: bool
) -> list[str]:
    """Arguments with which any stage serves the target. CaptureError where extra ones repeat."""
    server = run.settings.extract.server
    return server_flags(
        model=str(run.target_folder),
        device=server.device,
        tensor_parallel=server.tensor_parallel,
        memory_fraction=server.memory_fraction,
        chunked_prefill_tokens=server.chunked_prefill_tokens,
        max_running_requests=server.max_running_requests,
        cache_tokens=server.cache_tokens,
        dtype=dtype,
        remote_code=run.settings.target.remote_code,
        radix_cache=radix_cache,
        cuda_graphs=cuda_graphs,
        extra_arguments=server.extra_arguments,
    )


def environment_of(run: Run, *, staging: Path) -> dict[str, str]:
    """What the stage sets for the server's processes."""
    server = run.settings.extract.server
    extra = server_environment(
        device=server.device,
        tensor_parallel=server.tensor_parallel,
        cores=run.threads,
        nccl=run.nccl("extraction", explicit=server.nccl, gpus=run.settings.extract.gpus),
        capture=str(staging / CONFIGURATION),
    )
    return run.environment(gpus=run.settings.extract.gpus, extra=extra)


def check_server(run: Run, *, largest_bytes: int) -> None:
    """All that can be known before the wipe: interpreter, versions, plugin, flags, quota.

    largest_bytes: of the largest sample's states. StageError names what is missing.
    """
    settings = run.settings.extract
    flags_of(run)
    if settings.staging_quota_bytes < _QUOTA_REQUESTS * largest_bytes:
        raise StageError(
            f"extract.staging_quota_bytes is {settings.staging_quota_bytes}, the largest sample "
            f"has {largest_bytes} bytes of states",
            wanted=f"at least {_QUOTA_REQUESTS} times that, as the server writes several at once",
            next_step="raise the quota, or lower prepare.max_length and prepare again",
        )
    found = known_interpreter(run)
    if PLUGIN not in found["plugins"]:
        raise ServerUnfit(
            f"{settings.server.python} has SGLang, but not Cleanslate's capture plugin",
            wanted=f"the entry point {PLUGIN}",
            next_step=f"{settings.server.python} -m pip install --no-deps -e .",
        )


def known_interpreter(run: Run) -> dict[str, Any]:
    """What the server's interpreter has. StageError unless its SGLang is one that is known here."""
    python = run.settings.extract.server.python
    found = ask_interpreter(python.absolute())
    if found["sglang"] not in SUPPORTED:
        raise ServerUnfit(
            f"{python} has SGLang {found['sglang'] or '(none)'}",
            wanted=f"one of {', '.join(SUPPORTED)}: the capture knows the insides of these",
            next_step="make sglang-cpu (without a GPU), or set extract.server.python",
        )
    return found


def ask_interpreter(python: Path) -> dict[str, Any]:
    """Versions and plugins that an interpreter has, without importing them. StageError if none."""
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=child_environment({}),
        )
        value: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ServerUnfit(
            f"extract.server.python is {python}: {error}",
            wanted="an interpreter that has SGLang",
            next_step="make sglang-cpu (without a GPU), or set extract.server.python",
        ) from error
    return value


@contextmanager
def serving(run: Run, *, staging: Staging, log: Path, output: Path) -> Iterator[SglangEngine]:
    """The engine over a server of its own, probed; everything is stopped at the end.

    log: of the stage; the server's is beside it. output: gets server.json, what the server says of
    itself. StageError, CaptureError or ServerDied.
    """
    settings, facts = run.settings.extract, run.target_facts()
    server_settings = settings.server
    nonce = f"cs-{secrets.token_hex(6)}-"
    configuration = CaptureConfiguration(
        staging=staging.folder,
        quota_bytes=settings.staging_quota_bytes,
        taps=settings.taps,
        rid_prefix=nonce,
        ring_bytes=server_settings.capture_ring_bytes,
        writer_threads=server_settings.capture_writer_threads,
        timeout_seconds=min(float(server_settings.request_timeout_seconds), _MOST_WAIT_SECONDS),
    )
    told = {**asdict(configuration), "staging": str(staging.folder)}
    write_json(staging.folder / CONFIGURATION, told)
    environment = environment_of(run, staging=staging.folder)
    with SglangServer(
        flags_of(run),
        python=server_settings.python.absolute(),
        environment=child_environment(environment),
        log=log.with_name(f"{log.stem}-server.log"),
        startup_timeout_seconds=server_settings.startup_timeout_seconds,
        say=lambda line: SAY.info("%s", line),
    ) as server:

        def engine(prefix: str) -> SglangEngine:
            return SglangEngine(
                server,
                staging,
                rid_prefix=prefix,
                concurrency=server_settings.max_running_requests,
                timeout_seconds=server_settings.request_timeout_seconds,
                vocabulary_size=facts.vocabulary_size,
            )

        info = server.server_info()
        _check_running(server, info, run)
        with engine(f"{nonce}probe-") as prober:
            proven = _probe(run, prober, info=info, staging=staging, server=server)
        write_json(output / SERVER_FACTS, {**_facts(info), "probes": proven})
        with engine(nonce) as sampler:
            yield sampler


def _probe(
    run: Run,
    engine: SglangEngine,
    *,
    info: Mapping[str, Any],
    staging: Staging,
    server: SglangServer,
) -> list[str]:
    settings, facts = run.settings.extract, run.target_facts()
    probes = make_probes(
        _sample_ids(run),
        chunked_prefill_tokens=settings.server.chunked_prefill_tokens,
        longest=int(info.get("max_req_input_len") or facts.max_position_embeddings),
    )
    try:
        return run_probes(
            engine,
            probes,
            staging=staging,
            taps=settings.taps,
            hidden_size=facts.hidden_size,
            log=server.log,
            say=lambda line: SAY.info("%s", line),
        )
    except ServerDied:
        raise
    except CaptureError as error:
        heard = "".join(f"\n  | {line}" for line in lines_about(server.log_text(), "leanslate"))
        raise ServerUnfit(
            error.found + (f"; the server said:{heard}\n" if heard else ""),
            wanted=error.wanted,
            next_step=error.next_step,
        ) from error


def _check_running(server: SglangServer, info: Mapping[str, Any], run: Run) -> None:
    problems = wrong_flags(
        info, chunked_prefill_tokens=run.settings.extract.server.chunked_prefill_tokens
    )
    if problems:
        raise ServerUnfit(
            f"the running server: {'; '.join(problems)}",
            wanted="a server that runs with the flags it was given",
            next_step=f"see extract.server.extra_arguments, and why in {server.log}",
        )


def _sample_ids(run: Run) -> Sequence[int]:
    """Ids of the first samples, one after the other, for the probes."""
    samples = PreparedSamples.open(run.output("prepare"))
    ids: list[int] = []
    for entry in samples.entries:
        ids += samples.read(entry).input_ids.tolist()
        if len(ids) >= _PROBE_IDS:
            break
    return ids


def _facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """What of the server's own word goes into the manifest (its key does not)."""
    names = (
        "version", "dtype", "device", "tp_size", "dp_size", "attn_dp_size",
        "attention_backend", "chunked_prefill_size", "disable_radix_cache", "disable_cuda_graph",
        "disable_overlap_schedule", "max_running_requests", "max_total_num_tokens", "quantization",
    )  # fmt: skip
    return {name: info.get(name) for name in names}
