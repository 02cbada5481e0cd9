"""The front: one command a stage. Parses, calls, prints; every error leaves by the same door."""

import json
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.faults import Fault
from pipeline.settings.load import Loaded, flatten, load_settings, origin_of
from pipeline.slate.log import SAY, log_only, open_log
from pipeline.slate.manifest import Manifest
from pipeline.slate.stage import StageStopped
from pipeline.slate.wipe import MANIFEST

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

Profile = Annotated[str, typer.Option(help="A shipped profile's name, or a .yaml file.")]
Override = Annotated[list[str], typer.Option("--set", help="section.key=value; repeatable.")]
Input = Annotated[
    str, typer.Option("--input", help="Conversations to prepare: a file or a folder.")
]
Answers = Annotated[str, typer.Option(help="file or target: who writes the answers.")]
EngineName = Annotated[
    str, typer.Option("--engine", help="transformers or sglang: who runs the target in this stage.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an unsealed output.")]
NO_OVERRIDES: list[str] = []


def _load(
    profile: str,
    overrides: list[str],
    source: str = "",
    answers: str = "",
    *,
    stage: str = "",
    engine: str = "",
) -> Loaded:
    extra = []
    if source:
        path = json.dumps(str(Path(source).absolute()))
        extra = [f"prepare.input={path}", "prepare.prompts=null", "prepare.answers=file"]
    if answers:
        extra.append(f"prepare.answers={answers}")
    if engine:
        folder = load_settings(profile, overrides=[*extra, *overrides]).settings.folder
        extra += engine_overrides(stage, engine, folder=folder)
    return load_settings(profile, overrides=[*extra, *overrides])


def engine_overrides(stage: str, engine: str, *, folder: Path) -> list[str]:
    """What `--engine` sets: the engine of the stage it is given to.

    A sealed stage before it keeps the engine that it was made with; an extraction that is not
    sealed yet gets the same one. folder: of the run.
    """
    keys = {
        "prepare": "prepare.answering.engine",
        "extract": "extract.engine",
        "evaluate": "evaluate.engine",
    }
    order = ("prepare", "extract", "train", "export", "evaluate", "report")
    if stage not in order:
        return []
    found = []
    for name in order[: order.index(stage) + 1]:
        if name not in keys:
            continue
        sealed = None if name == stage else _sealed_engine(folder / name)
        wanted = "loop" if name == "evaluate" and engine == "transformers" else engine
        if sealed is not None or name == stage or name != "prepare":
            found.append(f"{keys[name]}={sealed or wanted}")
    return found


def _sealed_engine(output: Path) -> str | None:
    """The engine that a sealed output was made with; None where nothing is sealed."""
    if not (output / MANIFEST).is_file():
        return None
    settings = Manifest.read(output).settings
    # Sealed by a version that had no such choice, or made without writing answers: the default.
    found = settings.get("answering", settings).get("engine", "transformers")
    return str(found)


def _stage(name: str, help_text: str) -> None:
    def command(
        profile: Profile = "smollm2",
        overrides: Override = NO_OVERRIDES,
        input_path: Input = "",
        answers: Answers = "",
        engine: EngineName = "",
        resume: Resume = False,
    ) -> None:
        loaded = _load(profile, overrides, input_path, answers, stage=name, engine=engine)
        from pipeline.stages.plan import run_stage  # torch takes seconds; `show` needs none
        from pipeline.stages.run import Run

        run_stage(name, Run(loaded.settings, loaded.origins), resume=resume)

    command.__doc__ = help_text
    app.command(name)(command)


_stage("target", "Make the target's folder (done by itself when needed).")
_stage("prepare", "Conversations to token ids, supervised tokens and the draft vocabulary.")
_stage("extract", "Capture the target's states for every token, proven complete.")
_stage("train", "Train the drafter on the captured states.")
_stage("export", "Write the drafter as SGLang and vLLM load it.")
_stage("evaluate", "Measure acceptance on held-out prompts with the target.")
_stage("report", "One HTML page and PNGs about the run.")


@app.command()
def serve(
    profile: Profile = "smollm2",
    overrides: Override = NO_OVERRIDES,
    input_path: Input = "",
    answers: Answers = "",
    engine: EngineName = "",
) -> None:
    """Serve the target with the drafter until Ctrl-C, on this machine only."""
    loaded = _load(profile, overrides, input_path, answers, stage="export", engine=engine)
    from pipeline.stages.run import Run
    from pipeline.stages.serve import serve_run

    serve_run(Run(loaded.settings, loaded.origins))


@app.command()
def show(
    profile: Profile = "smollm2",
    overrides: Override = NO_OVERRIDES,
    input_path: Input = "",
    answers: Answers = "",
) -> None:
    """Print every setting with its value, origin and meaning."""
    loaded = _load(profile, overrides, input_path, answers)
    for key, value, meaning in flatten(loaded.settings):
        shown = json.dumps(_plain(value), ensure_ascii=False)
        origin = origin_of(key, loaded.origins)
        typer.echo(f"{key} = {shown}   [{origin}]" + (f"   {meaning}" if meaning else ""))
    typer.echo(f"(run folder: {loaded.settings.folder})")


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return value


@app.command()
def verify(profile: Profile = "smollm2", overrides: Override = NO_OVERRIDES) -> None:
    """Re-read everything that is sealed; exit 1 and name what is damaged."""
    loaded = _load(profile, overrides)
    from pipeline.stages.plan import STAGES
    from pipeline.stages.run import Run
    from pipeline.stages.verify import verify_run

    run = Run(loaded.settings)
    verdicts = verify_run(run.folder, stages=list(STAGES), threads=run.threads)
    for verdict in verdicts:
        typer.echo(
            f"{verdict.stage}: {'DAMAGED' if verdict.problems else 'whole'} {verdict.digest}"
        )
        for problem in verdict.problems:
            typer.echo(f"  {problem}")
    if not verdicts:
        typer.echo(f"nothing is sealed in {run.folder}")
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(1)


@app.command("clean-slate")
def clean_slate(profile: Profile = "smollm2", overrides: Override = NO_OVERRIDES) -> None:
    """Wipe what this project owns in the run's folder and the downloads; logs stay."""
    loaded = _load(profile, overrides)
    from pipeline.slate.lock import lock
    from pipeline.slate.wipe import owned_directories, wipe

    root = loaded.settings.run.root.absolute()
    folder = loaded.settings.folder
    with lock(folder, purpose="clean-slate"):
        owned = owned_directories(folder)
        for directory in owned:
            wipe(directory, root=folder)
            directory.rmdir()
            typer.echo(f"wiped {directory}")
    downloads = root / "downloads"
    if downloads in owned_directories(root):
        wipe(downloads, root=root)
        downloads.rmdir()
        typer.echo(f"wiped {downloads}")
    typer.echo(f"{folder}: nothing of this project is left but its logs")


def main() -> None:
    """Entry point. Exit status: 0 done, 1 a fault that is explained, 2 usage, 70 a bug, 130/143."""
    _guard(lambda: app(standalone_mode=False))


def _guard(command: Callable[[], Any]) -> None:
    try:
        status = command()
    except Fault as fault:
        log_only(traceback.format_exc())
        _say_error(fault.found, fault.wanted, fault.next_step)
        sys.exit(1)
    except (KeyboardInterrupt, StageStopped, typer.Abort) as stopped:
        log_only(traceback.format_exc())
        _say_error(
            "stopped before the end; nothing was sealed",
            "a run to the end",
            "the same command with RESUME=1 continues",
        )
        sys.exit(143 if isinstance(stopped, StageStopped) else 130)
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("click", "typer"):
            _say_error(str(error) or type(error).__name__, "a command as in --help", "--help")
            sys.exit(2)
        _unexpected(error)
        sys.exit(70)
    if isinstance(status, int) and status:  # click gives the status of an Exit back
        sys.exit(status)


def _unexpected(error: Exception) -> None:
    if not any(isinstance(handler, logging.FileHandler) for handler in SAY.handlers):
        open_log(Path("runs").absolute(), stage="error")
    log_only(traceback.format_exc())
    log = next(h.baseFilename for h in SAY.handlers if isinstance(h, logging.FileHandler))
    _say_error(
        f"unexpected {type(error).__name__}: {str(error) or '(no message)'}",
        "no such error: this is a fault of this program",
        f"the traceback is in {log}; please report it",
    )


def _say_error(found: str, wanted: str, next_step: str) -> None:
    sys.stderr.write(f"error: {found}\n  wanted: {wanted}\n  next:   {next_step}\n")
    log_only(f"error: {found}; wanted: {wanted}; next: {next_step}")


if __name__ == "__main__":
    main()
