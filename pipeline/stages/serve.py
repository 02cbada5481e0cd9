"""serve: the target with its drafter on SGLang, in the foreground, for this machine only."""

import json
import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pipeline.capture.sglang_server import SglangServer
from pipeline.host.gpus import read_gpus
from pipeline.slate.errors import GpusBusy
from pipeline.slate.lock import lock
from pipeline.slate.log import SAY, log_only, open_log
from pipeline.slate.manifest import Manifest
from pipeline.slate.stage import check_host, ensure, gpu_problems
from pipeline.stages.errors import StageError
from pipeline.stages.extract_server import known_interpreter
from pipeline.stages.plan import check_environments, following, needed_by, stage_of
from pipeline.stages.run import Run
from pipeline.stages.server import (
    Drafting,
    ServerPlan,
    check_running,
    make_server,
    plan_environment,
)

KEY_FILE = "serve.key"
_LOOK_SECONDS = 1.0


def serve_run(run: Run) -> None:
    """Serves until Ctrl-C or SIGTERM, which end it in order; returns then.

    Makes the export first where there is none. The key lies in `serve.key` in the run's folder,
    readable by its owner alone, for as long as the server runs. StageError and SlateError before
    the start; ServerDied when the server ends by itself.
    """
    plan = serving_plan(run)
    plan_environment(run, plan)  # may be refused, so before anything is made
    run = following(run, "export", resume=False)
    names = [*needed_by("export", run), "export"]
    check_environments(names, run)
    for name in names:
        ensure(stage_of(name, run), root=run.folder, threads=run.threads, place=run.place)
    with lock(run.folder, purpose="serve", container=run.place.container):
        log = open_log(run.folder, stage="serve")
        known_interpreter(run)
        check_host("serve", plan.gpus, run.place)
        if plan.gpus and (problems := gpu_problems(read_gpus(), plan.gpus)):
            raise GpusBusy(
                "; ".join(problems),
                wanted="every GPU of the server at 0 MiB with no process",
                next_step="stop what holds them (this project never kills what it did not start)",
            )
        SAY.info("serve: log %s", log)
    # The run is free again: what the server has loaded is in its memory.
    try:
        with _signals_as_interrupt(), make_server(run, plan, log=log) as server:
            log_only(f"the server: {check_running(server, plan)}")
            with _key_file(run.folder / KEY_FILE, server.key) as key:
                for line in invitation(run, server, key=key):
                    SAY.info("%s", line)
                _watch(server)
    except KeyboardInterrupt:
        SAY.info("serve: stopped in order")


def serving_plan(run: Run) -> ServerPlan:
    """How the target is served to people: prefix cache on, the drafts that evaluate measures.

    StageError when the GPUs do not fit the server's tensor parallel ranks.
    """
    settings, server = run.settings.evaluate, run.settings.extract.server
    wanted = server.tensor_parallel if server.device == "cuda" else 0
    if len(settings.gpus) != wanted:
        raise StageError(
            f"evaluate.gpus names {len(settings.gpus)} GPUs",
            wanted=f"{wanted}, as extract.server on {server.device} with tensor_parallel "
            f"{server.tensor_parallel} takes",
            next_step="set evaluate.gpus, extract.server.device or extract.server.tensor_parallel",
        )
    return ServerPlan(
        settings.compute_dtype,
        settings.gpus,
        radix_cache=True,
        drafting=Drafting(run.output("export"), settings.draft_tokens),
        extra_flags=("--served-model-name", run.settings.run.name),
    )


def invitation(run: Run, server: SglangServer, *, key: Path) -> list[str]:
    """What the person is told: address, key, and a request that can be pasted into a shell."""
    digest = Manifest.read(run.output("export")).digest
    question = {
        "model": run.settings.run.name,
        "messages": [{"role": "user", "content": "What can I cook with eggs and rice?"}],
        "max_tokens": 64,
    }
    return [
        f"serve: {server.url} (this machine only), {run.settings.evaluate.draft_tokens} drafts a "
        f"pass, drafter {digest[:12]}",
        f"serve: the API key is in {key} (mode 600) until the server stops",
        "serve: try, in another shell:",
        f"  curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f'    -H "Authorization: Bearer $(cat {shlex.quote(str(key))})" \\',
        f"    -d {shlex.quote(json.dumps(question))}",
        "serve: Ctrl-C stops it",
    ]


def _watch(server: SglangServer) -> None:
    """Comes back only by an exception: the interrupt, or ServerDied."""
    while True:
        server.check()
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _key_file(path: Path, key: str) -> Iterator[Path]:
    """The key in a file that only its owner can read, while the context lasts."""
    path.unlink(missing_ok=True)  # of a server that was killed
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, f"{key}\n".encode())
        os.close(handle)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """Both ways to end it: a shell that starts it in the background has SIGINT ignored."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    ways = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(way, stop) for way in ways]
    try:
        yield
    finally:
        for way, handler in zip(ways, before, strict=True):
            signal.signal(way, handler)
