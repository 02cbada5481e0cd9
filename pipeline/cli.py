"""The front: one command a stage. Parses, calls, prints; every error leaves by the same door."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic_core import to_jsonable_python

from pipeline.containers.images import BuiltImages, check_same_code
from pipeline.containers.lines import lines_of
from pipeline.containers.plan import (
    ADOPT,
    FACTS,
    REPAIR,
    STAGES,
    Caller,
    Request,
    gpus_of,
    image_kind,
    plan,
)
from pipeline.settings.errors import SettingsError
from pipeline.settings.load import (
    Loaded,
    flatten,
    load_settings,
    origin_of,
    profile_files,
)
from pipeline.settings.model import Settings
from pipeline.slate.door import guard
from pipeline.slate.place import Place
from pipeline.slate.wipe import MANIFEST, read_marker
from pipeline.stages.follow import recorded_tokens, unfinished_dump
from pipeline.stages.nccl_file import unseen_nccl
from pipeline.stages.overrides import engine_overrides, source_overrides

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
Samples = Annotated[
    str, typer.Option("--samples", help="Token ids to prepare: a file of input_ids and loss_mask.")
]
DumpPath = Annotated[str, typer.Option("--dump", help="Folder of req_N folders to adopt.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an unsealed output.")]
ImageFacts = Annotated[str, typer.Option("--image-facts", hidden=True)]  # given in a container
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
ContainerName = Annotated[str, typer.Option("--container", hidden=True)]
NO_OVERRIDES: list[str] = []
NO_PATHS: list[Path] = []
_NCCL = Path("runs/host/nccl.json")
_LAUNCHER = Path(__file__).parent.parent / "docker" / "run.sh"


def _load(
    profile: str,
    overrides: list[str],
    source: str = "",
    answers: str = "",
    *,
    samples: str = "",
    dump: str = "",
    stage: str = "",
    engine: str = "",
) -> Loaded:
    extra = source_overrides(source, answers, samples=samples, dump=dump)
    if engine or stage == REPAIR:
        folder = load_settings(profile, overrides=[*extra, *overrides]).settings.folder
        extra += engine_overrides(stage, engine, folder=folder)
    return load_settings(profile, overrides=[*extra, *overrides])


def _stage(name: str, help_text: str) -> None:
    def command(
        profile: Profile = "smollm2",
        overrides: Override = NO_OVERRIDES,
        input_path: Input = "",
        answers: Answers = "",
        samples: Samples = "",
        dump: DumpPath = "",
        engine: EngineName = "",
        resume: Resume = False,
        image_facts: ImageFacts = "",
        container: ContainerName = "",
    ) -> None:
        loaded = _load(
            profile,
            overrides,
            input_path,
            answers,
            samples=samples,
            dump=dump,
            stage=name,
            engine=engine,
        )
        if loaded.settings.run.runtime == "docker" and not image_facts:
            _hand_over()
        place = _place(name, loaded.settings, facts=image_facts, container=container)
        from pipeline.stages.plan import run_stage  # torch takes seconds; `show` needs none
        from pipeline.stages.run import Run

        run_stage(name, Run(loaded.settings, loaded.origins, place), resume=resume)

    command.__doc__ = help_text
    app.command(name)(command)


def _place(stage: str, settings: Settings, *, facts: str, container: str) -> Place:
    """The container that the launcher says this process is in; the host where it says nothing."""
    wanted, shm = settings.run.host, settings.run.shared_memory_bytes
    if not facts:
        return Place(wanted=wanted, shared_memory_bytes=shm)
    built = BuiltImages.read(Path(facts))
    image = built.provenance(image_kind(stage, settings))
    return Place(image, built.commit, container or None, wanted=wanted, shared_memory_bytes=shm)


def _hand_over() -> NoReturn:
    """Becomes the launcher of containers, with the same arguments."""
    if not _LAUNCHER.is_file():
        raise SettingsError(
            f"run.runtime is docker, and there is no {_LAUNCHER}",
            wanted="the command line of a checkout of the project",
            next_step="use its Makefile, or set run.runtime=local",
        )
    os.execvp("bash", ["bash", str(_LAUNCHER), *sys.argv[1:]])  # noqa: S606  no shell string


_stage("target", "Make the target's folder (done by itself when needed).")
_stage("prepare", "Conversations to token ids, supervised tokens and the draft vocabulary.")
_stage("extract", "Capture the target's states for every token, proven complete.")
_stage("adopt", "Take states that another system dumped as the output of extract, proven.")
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
    image_facts: ImageFacts = "",
    container: ContainerName = "",
) -> None:
    """Serve the target with the drafter until Ctrl-C, on this machine only."""
    loaded = _load(profile, overrides, input_path, answers, stage="export", engine=engine)
    if loaded.settings.run.runtime == "docker" and not image_facts:
        _hand_over()
    place = _place("serve", loaded.settings, facts=image_facts, container=container)
    from pipeline.stages.run import Run
    from pipeline.stages.serve import serve_run

    serve_run(Run(loaded.settings, loaded.origins, place))


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
        shown = json.dumps(to_jsonable_python(value), ensure_ascii=False)
        origin = origin_of(key, loaded.origins)
        typer.echo(f"{key} = {shown}   [{origin}]" + (f"   {meaning}" if meaning else ""))
    typer.echo(f"(run folder: {loaded.settings.folder})")


@app.command()
def verify(
    profile: Profile = "smollm2",
    overrides: Override = NO_OVERRIDES,
    input_path: Input = "",
    answers: Answers = "",
    as_json: AsJson = False,
    container: ContainerName = "",
) -> None:
    """Re-read everything that is sealed; exit 1 and name what is damaged and what to do."""
    loaded = _load(profile, overrides, input_path, answers)
    from pipeline.stages.run import Run
    from pipeline.stages.verify import report, verify_run

    run = Run(loaded.settings)
    verdicts = verify_run(
        run.folder, stages=STAGES, threads=run.threads, container=container or None
    )
    for line in report(verdicts, folder=run.folder, stages=STAGES, as_json=as_json):
        typer.echo(line)
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def repair(
    profile: Profile = "smollm2",
    overrides: Override = NO_OVERRIDES,
    input_path: Input = "",
    answers: Answers = "",
    image_facts: ImageFacts = "",
    container: ContainerName = "",
) -> None:
    """Capture again exactly the samples of extract that verify finds damaged, and seal it."""
    loaded = _load(profile, overrides, input_path, answers, stage=REPAIR)
    if loaded.settings.run.runtime == "docker" and not image_facts:
        _hand_over()
    place = _place(REPAIR, loaded.settings, facts=image_facts, container=container)
    from pipeline.stages.repair import repair_run
    from pipeline.stages.run import Run

    if not repair_run(Run(loaded.settings, loaded.origins, place)):
        raise typer.Exit(1)


@app.command()
def preflight(
    host: Annotated[Path | None, typer.Option(help="Ansible variables with ready_host.")] = None,
    stage: Annotated[str, typer.Option(help="Only what this stage meets.")] = "",
    profile: Annotated[str, typer.Option(help="Whose run.host, GPUs and /dev/shm count.")] = "",
    overrides: Override = NO_OVERRIDES,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Is this host ready? Exit status 3, and what to do, when it is not or cannot be seen to be."""
    from pipeline.host.preflight import NOT_READY, scope_of
    from pipeline.host.preflight import preflight as look

    settings = load_settings(profile, overrides=overrides).settings if profile else None
    if stage and stage not in (*STAGES, "serve"):
        raise SettingsError(
            f"there is no stage {stage}",
            wanted=f"one of {', '.join(STAGES)}, serve",
            next_step="leave --stage out for the whole host",
        )
    wanted = host or (settings.run.host if settings else None)
    if wanted is None:
        raise SettingsError(
            "neither --host nor a profile with run.host says what a ready host is",
            wanted="an Ansible group_vars file with ready_host",
            next_step="--host ansible/group_vars/gpu_hosts.yml",
        )
    scope = scope_of(
        stage,
        gpus=gpus_of(stage, settings) if stage and settings else None,
        shm_bytes=settings.run.shared_memory_bytes if settings else None,
    )
    found = look(wanted, scope)
    for line in [found.as_json()] if as_json else found.lines():
        typer.echo(line)
    if not found.verdict.ready:
        raise typer.Exit(NOT_READY)


@app.command("tune-nccl")
def tune_nccl(
    gpus: Annotated[str, typer.Option(help="Of extraction, as 0,1; empty: all.")] = "",
    train_gpus: Annotated[str, typer.Option(help="Of training; empty: the same.")] = "",
    out: Annotated[Path, typer.Option(help="JSON that run.nccl takes.")] = _NCCL,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows of OUT.")] = False,
    ll128: Annotated[bool, typer.Option("--ll128", help="Try LL128 too.")] = False,
    simulated: Annotated[bool, typer.Option("--simulated", help="gloo on the CPU.")] = False,
    budget_seconds: Annotated[float, typer.Option(help="0: by the number of GPUs.")] = 0.0,
    silence_seconds: Annotated[float, typer.Option(help="No word so long is a hang.")] = 15.0,
) -> None:
    """Measure NCCL's variables on this host's GPUs; write what is fastest and right."""
    from pipeline.nccl.plan import Grid
    from pipeline.nccl.tune import Options, gpu_indexes, tune

    protocols = (*Grid().protocols, *(["LL128"] if ll128 else []))
    options = Options(
        out=out,
        gpus=gpu_indexes(gpus),
        train_gpus=gpu_indexes(train_gpus),
        backend="gloo" if simulated else "nccl",
        resume=resume,
        budget_seconds=budget_seconds,
        silence_seconds=silence_seconds,
        grid=Grid(protocols=protocols),
    )
    tune(options, typer.echo)


@app.command("clean-slate")
def clean_slate(
    profile: Profile = "smollm2",
    overrides: Override = NO_OVERRIDES,
    input_path: Input = "",
    answers: Answers = "",
    container: ContainerName = "",
) -> None:
    """Wipe what this project owns in the run's folder and the downloads; logs stay."""
    loaded = _load(profile, overrides, input_path, answers)
    from pipeline.slate.lock import lock
    from pipeline.slate.wipe import owned_directories, wipe

    root = loaded.settings.run.root.absolute()
    folder = loaded.settings.folder
    with lock(folder, purpose="clean-slate", container=container or None):
        owned = owned_directories(folder)
        for directory in owned:
            wipe(directory, root=folder)
            directory.rmdir()
            typer.echo(f"wiped {directory}")
        staged = loaded.settings.staging_folder  # of a run that was killed
        if staged.is_dir():
            wipe(staged, root=loaded.settings.extract.staging.absolute())
            staged.rmdir()
            typer.echo(f"wiped {staged}")
    downloads = root / "downloads"
    if downloads in owned_directories(root):
        wipe(downloads, root=root)
        downloads.rmdir()
        typer.echo(f"wiped {downloads}")
    typer.echo(f"{folder}: nothing of this project is left but its logs")


@app.command("container-plan", hidden=True)
def container_plan(
    stage: str,
    user: Annotated[str, typer.Option()],
    facts: Annotated[Path, typer.Option()],
    tree: Annotated[Path, typer.Option(help="The caller's folder `pipeline`.")],
    profile: Profile = "smollm2",
    overrides: Override = NO_OVERRIDES,
    input_path: Input = "",
    answers: Answers = "",
    engine: EngineName = "",
    samples: Samples = "",
    dump: DumpPath = "",
    resume: Resume = False,
    as_json: AsJson = False,
    network: str = "",
    ca: Path | None = None,
    pip_conf: Path | None = None,
    shown: Annotated[list[Path], typer.Option(help="What the launcher looked for.")] = NO_PATHS,
) -> None:
    """Print what `docker/run.sh` starts for a stage; or `need PATH`, a file it wants to see first.

    Runs in a container that sees nothing of the host but what it asked for in this way.
    """
    check_same_code(tree, Path(__file__).parent)
    files = profile_files(profile)
    if unseen := [path for path in files if path not in shown]:
        typer.echo(f"need {unseen[0]}")
        return
    extra = source_overrides(input_path, answers, samples=samples, dump=dump)
    folder = load_settings(profile, overrides=[*extra, *overrides]).settings.folder
    if not {folder, *folder.parents} & {*shown}:
        typer.echo(f"need {folder}")
        return
    if engine or stage == REPAIR:
        extra += engine_overrides("export" if stage == "serve" else stage, engine, folder=folder)
    settings = load_settings(profile, overrides=[*extra, *overrides]).settings
    sealed = {name for name in STAGES if (folder / name / MANIFEST).is_file()}
    follows = stage in (*STAGES, ADOPT)
    request = Request(
        stage=stage,
        profile=str(files[0]) if files else profile,
        files=files,
        tokens=recorded_tokens(folder / "prepare", {}) if follows else None,
        dump=unfinished_dump(folder / "extract") if follows else None,
        overrides=[*extra, *overrides],
        resume=resume,
        as_json=as_json,
        begun={name for name in STAGES if (folder / name).is_dir() and read_marker(folder / name)},
        sealed=sealed,
    )
    if file := unseen_nccl(request, settings, shown):
        typer.echo(f"need {file}")
        return
    caller = Caller(user=user, facts=facts, network=network, ca=ca, pip_conf=pip_conf)
    built = BuiltImages.read(FACTS)
    containers = [] if stage == "release" else plan(settings, request, caller=caller, built=built)
    for line in lines_of(containers, folder=folder):
        typer.echo(line)


def main() -> None:
    """Entry point. Exit status: 0 done, 1 a fault that is explained, 2 usage, 70 a bug, 130/143."""
    guard(lambda: app(standalone_mode=False))


if __name__ == "__main__":
    main()
