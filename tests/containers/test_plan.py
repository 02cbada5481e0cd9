"""What each stage's container gets, from the settings alone."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from pipeline.cli import app
from pipeline.containers.errors import ContainerError
from pipeline.containers.images import BuiltImages, Image
from pipeline.containers.plan import (
    OTHERS,
    STAGES,
    Caller,
    Container,
    Request,
    plan,
    stages_to_run,
)
from pipeline.settings.load import load_settings
from pipeline.settings.model import Settings
from pipeline.stages.plan import STAGES as RUN_STAGES
from pipeline.stages.plan import needed_by
from pipeline.stages.run import Run

TRAINER, EXTRACTOR = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
PACKAGE = Path(__file__).parents[2] / "pipeline"
CALLER = Caller(user="1000:1001", facts=Path("/src/images/images.json"))


def built(variant: str = "cuda") -> BuiltImages:
    return BuiltImages(
        version="9.9",
        commit="abc",
        images={
            "trainer": Image("cleanslate-trainer:9.9", TRAINER, "None", "sha256:b"),
            "extractor": Image("cleanslate-extractor:9.9", EXTRACTOR, variant, "sha256:b"),
        },
        inputs={},
    )


def settings_of(profile: str, *overrides: str) -> Settings:
    return load_settings(profile, overrides=["run.root=/data/runs", *overrides]).settings


def planned(
    stage: str, profile: str, *overrides: str, caller: Caller = CALLER, **request: object
) -> list[Container]:
    asked = replace(Request(stage=stage, profile=profile, overrides=overrides), **request)
    variant = "cpu" if settings_of(profile, *overrides).extract.server.device == "cpu" else "cuda"
    return plan(settings_of(profile, *overrides), asked, caller=caller, built=built(variant))


def values(container: Container, option: str) -> list[str]:
    pairs = zip(container.arguments, container.arguments[1:], strict=False)
    return [value for name, value in pairs if name == option]


def last(stage: str, profile: str, *overrides: str, caller: Caller = CALLER) -> Container:
    return planned(stage, profile, *overrides, caller=caller)[-1]


def sets(container: Container) -> list[str]:
    pairs = zip(container.command, container.command[1:], strict=False)
    return [value for name, value in pairs if name == "--set"]


ALL = [(stage, profile) for profile in ("tiny", "kimi-k2.5") for stage in (*STAGES, *OTHERS)]


@pytest.mark.parametrize(("stage", "profile"), ALL)
def test_no_container_is_given_more_than_it_needs(stage: str, profile: str) -> None:
    for container in planned(stage, profile, sealed=("target",)):
        text = " ".join(container.arguments)
        assert {"--init", "--read-only"} <= set(container.arguments)
        assert values(container, "--cap-drop") == ["ALL"]
        assert values(container, "--security-opt") == ["no-new-privileges"]
        assert values(container, "--user") == ["1000:1001"]
        assert values(container, "--pids-limit") == ["16384"]
        for forbidden in (
            "--privileged",
            "--cap-add",
            "docker.sock",
            "--pid",
            "--ipc",
            "--device ",
        ):
            assert forbidden not in text.replace("--pids-limit", "")


@pytest.mark.parametrize(("stage", "profile"), ALL)
def test_the_inner_command_has_only_options_that_there_are(stage: str, profile: str) -> None:
    group = typer.main.get_command(app)
    for container in planned(stage, profile):
        command = group.commands[container.stage]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {part for part in container.command[3:] if part.startswith("--")} <= known


def test_the_order_and_the_needs_are_those_of_the_stages() -> None:
    assert tuple(RUN_STAGES) == STAGES
    for profile in ("tiny", "kimi-k2.5"):
        settings = settings_of(profile)
        for stage in STAGES:
            wanted = [*needed_by(stage, Run(settings)), stage]
            assert stages_to_run(Request(stage, profile), settings) == wanted


def test_a_stage_before_runs_only_when_it_is_not_sealed() -> None:
    found = planned("train", "tiny", sealed=("target", "prepare"), begun=("extract",))
    assert [container.stage for container in found] == ["extract", "train"]
    assert ["--resume" in container.command for container in found] == [True, False]


def test_resume_is_for_the_stage_that_was_asked_for() -> None:
    found = planned("extract", "tiny", sealed=("target",), resume=True)
    assert ["--resume" in container.command for container in found] == [False, True]


def test_serving_needs_the_export() -> None:
    found = planned("serve", "tiny", sealed=STAGES[:4])
    assert [container.stage for container in found] == ["export", "serve"]


@pytest.mark.parametrize(
    ("stage", "overrides", "image"),
    [
        ("prepare", [], TRAINER),
        ("prepare", ["prepare.answering.engine=sglang"], EXTRACTOR),
        ("prepare", ["prepare.answering.engine=sglang", "prepare.answers=file"], TRAINER),
        ("extract", [], TRAINER),
        ("extract", ["extract.engine=sglang"], EXTRACTOR),
        ("train", ["extract.engine=sglang"], TRAINER),
        ("evaluate", ["extract.engine=sglang"], TRAINER),
        ("evaluate", ["evaluate.engine=sglang"], EXTRACTOR),
        ("serve", [], EXTRACTOR),
    ],
)
def test_a_stage_with_a_server_runs_in_the_extractor(
    stage: str, overrides: list[str], image: str
) -> None:
    cpu = ["extract.server.device=cpu", "extract.server.tensor_parallel=1"]
    assert last(stage, "tiny", *cpu, *overrides).image == image


def test_the_cpu_variant_is_refused_for_gpus() -> None:
    settings = settings_of("kimi-k2.5")
    with pytest.raises(ContainerError, match="machines without a GPU"):
        plan(settings, Request("extract", "kimi-k2.5"), caller=CALLER, built=built("cpu"))


def test_training_on_gpus_needs_the_compiler_of_the_extractor() -> None:
    assert last("train", "kimi-k2.5").image == EXTRACTOR
    assert last("train", "tiny").image == TRAINER
    settings = settings_of("tiny", "train.gpus=[0]")
    with pytest.raises(ContainerError, match="machines without a GPU"):
        plan(settings, Request("train", "tiny"), caller=CALLER, built=built("cpu"))


def test_an_image_that_was_not_built_is_named() -> None:
    only = replace(built(), images={"trainer": built().images["trainer"]})
    with pytest.raises(ContainerError, match=r"built images are trainer.*make images"):
        plan(settings_of("kimi-k2.5"), Request("extract", "x"), caller=CALLER, built=only)


def test_gpus_are_reserved_by_number_and_counted_from_0_inside() -> None:
    container = last("train", "kimi-k2.5", "train.gpus=[4,5,6,7]")
    assert container.gpus == (4, 5, 6, 7)
    assert values(container, "--gpus") == ['"device=4,5,6,7"']
    assert values(container, "--ulimit") == ["memlock=-1:-1", "stack=67108864:67108864"]
    assert "train.gpus=[0, 1, 2, 3]" in sets(container)
    assert "extract.gpus=[0, 1, 2, 3, 4, 5, 6, 7]" in sets(container)


@pytest.mark.parametrize("stage", STAGES)
def test_without_gpus_there_is_no_flag_of_them(stage: str) -> None:
    container = last(stage, "tiny")
    assert container.gpus == ()
    assert not values(container, "--gpus")
    assert not values(container, "--ulimit")


def test_the_staging_folder_is_a_tmpfs_of_the_quota_and_a_little() -> None:
    mounts = values(last("extract", "kimi-k2.5"), "--mount")
    size = (128 << 30) + (2 << 30)
    assert mounts == [f'type=tmpfs,"target=/mnt/hs",tmpfs-size={size},tmpfs-mode=1777']
    assert not values(last("train", "kimi-k2.5"), "--mount")


def test_staging_in_dev_shm_itself_enlarges_that() -> None:
    container = last("extract", "tiny", "extract.staging=/dev/shm")
    assert not values(container, "--mount")
    assert values(container, "--shm-size") == [str((1 << 30) + (1 << 20) + (2 << 30))]


def test_memory_file_systems_have_the_sizes_of_the_settings() -> None:
    sizes = ("run.shared_memory_bytes=100000000", "run.scratch_bytes=200000000")
    container = last("train", "tiny", *sizes)
    assert values(container, "--shm-size") == ["100000000"]
    options = "rw,nosuid,nodev,noexec,mode=1777,size=200000000"
    assert values(container, "--tmpfs") == [f"/tmp:{options}"]  # noqa: S108


@pytest.mark.parametrize(
    ("stage", "profile", "way"),
    [("extract", "kimi-k2.5", "exec"), ("train", "kimi-k2.5", "exec"), ("train", "tiny", "noexec")],
)
def test_code_is_loaded_from_tmp_only_where_kernels_are_compiled(
    stage: str, profile: str, way: str
) -> None:
    assert f",{way}," in values(last(stage, profile), "--tmpfs")[0]


@pytest.mark.parametrize(
    ("stage", "profile", "network"),
    [
        ("target", "smollm2", []),
        ("prepare", "smollm2", []),
        ("target", "tiny", ["none"]),
        ("prepare", "tiny", ["none"]),
        ("extract", "smollm2", ["none"]),
        ("train", "smollm2", ["none"]),
        ("evaluate", "smollm2", ["none"]),
        ("clean-slate", "smollm2", ["none"]),
        ("serve", "smollm2", ["host"]),
    ],
)
def test_only_what_fetches_has_a_network(stage: str, profile: str, network: list[str]) -> None:
    assert values(last(stage, profile), "--network") == network


def test_what_pip_needs_is_lent_to_stages_that_fetch_and_to_no_other() -> None:
    caller = replace(CALLER, network="host", ca=Path("/etc/ca.pem"), pip_conf=Path("/etc/pip.conf"))
    fetching = last("target", "smollm2", caller=caller)
    assert values(fetching, "--network") == ["host"]
    lent = {mount.target: mount.source for mount in fetching.mounts}
    assert lent[Path("/run/cleanslate/ca.pem")] == Path("/etc/ca.pem")
    assert lent[Path("/run/cleanslate/pip.conf")] == Path("/etc/pip.conf")
    variables = values(fetching, "--env")
    assert "PIP_CERT=/run/cleanslate/ca.pem" in variables
    assert "PIP_CONFIG_FILE=/run/cleanslate/pip.conf" in variables
    assert "HTTPS_PROXY" in variables
    other = last("extract", "smollm2", caller=caller)
    assert [mount.target for mount in other.mounts] == [
        Path("/run/cleanslate/images.json"),
        Path("/data/runs"),
    ]
    assert not [one for one in values(other, "--env") if "PROXY" in one or "CERT" in one]


def test_the_run_is_writable_and_what_is_read_is_not(tmp_path: Path) -> None:
    overrides = (
        f'prepare={{prompts: null, input: "{tmp_path / "my talks"}", answers: file}}',
        f'target.source={{kind: folder, path: "{tmp_path / "model"}"}}',
        f"train.warm_start={tmp_path / 'old'}",
    )
    mounts = {m.source: m.writable for m in last("train", "smollm2", *overrides).mounts}
    assert mounts == {
        Path("/data/runs"): True,
        CALLER.facts: False,
        tmp_path / "my talks": False,
        tmp_path / "model": False,
        tmp_path / "old": False,
    }


def test_the_files_of_a_profile_are_seen(tmp_path: Path) -> None:
    files = (tmp_path / "mine.yaml", tmp_path / "base.yaml")
    mounts = planned("train", "tiny", files=files)[-1].mounts
    assert [mount.source for mount in mounts[:2]] == list(files)


def test_a_file_of_the_package_is_the_images_own() -> None:
    sources = [mount.source for mount in last("prepare", "tiny").mounts]
    assert sources == [CALLER.facts, Path("/data/runs")]


def test_what_a_ready_host_is_is_lent_from_the_checkout_or_from_where_it_is_named() -> None:
    inside = Path("/run/cleanslate/host.yml")
    shipped = {mount.target: mount for mount in last("train", "kimi-k2.5").mounts}
    assert shipped[inside].source == Path("/src/ansible/group_vars/gpu_hosts.yml")
    assert not shipped[inside].writable
    own = last("train", "kimi-k2.5", "run.host=/etc/mine.yml")
    assert {m.target: m.source for m in own.mounts}[inside] == Path("/etc/mine.yml")
    assert f"run.host={inside}" in sets(own)
    assert inside not in {mount.target for mount in last("train", "tiny").mounts}


@pytest.mark.parametrize("stage", ["extract", "train", "evaluate", "serve"])
def test_the_hosts_nccl_variables_are_lent_where_stages_look_for_them(stage: str) -> None:
    """run.sh leaves a mount out where the host has no file: then the stage itself says so."""
    file = Path("/etc/cleanslate/nccl.json")
    container = last(stage, "kimi-k2.5")
    assert [one.source for one in container.mounts if one.target == file] == [file]
    assert not any(one.writable for one in container.mounts if one.target == file)
    assert not [one for one in sets(container) if one.startswith("run.nccl")]


def asked_for_plan(
    stage: str, folder: Path, *more: str, shown: tuple[Path, ...]
) -> subprocess.CompletedProcess[str]:
    """The command in which run.sh asks for a plan: no image is built here, so none comes out."""
    sets = (f"run.root={folder}", f"run.nccl={folder}/nccl.json", *more)
    return subprocess.run(
        [
            *(sys.executable, "-m", "pipeline.cli", "container-plan", stage, "--user", "0:0"),
            *("--facts", str(folder / "images.json"), "--tree", str(PACKAGE)),
            *("--profile", "kimi-k2.5"),
            *(part for one in sets for part in ("--set", one)),
            *(part for one in shown for part in ("--shown", str(one))),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_file_of_nccls_variables_is_said_before_the_first_container(
    tmp_path: Path,
) -> None:
    file = tmp_path / "nccl.json"
    first = asked_for_plan("train", tmp_path, shown=(tmp_path,))
    assert first.stdout == f"need {file}\n"
    refused = asked_for_plan("train", tmp_path, shown=(tmp_path, file))
    assert refused.returncode == 1
    assert f"error: run.nccl cannot be read: {file}" in refused.stderr
    file.write_text('{"extraction": {}, "training": {}}')
    there = asked_for_plan("train", tmp_path, shown=(tmp_path, file))
    assert "images.json" in there.stderr


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("prepare", ()),
        (
            "extract",
            ("extract.gpus=[0]", "evaluate.gpus=[0]", "extract.server.tensor_parallel=1"),
        ),
    ],
)
def test_stages_that_send_nothing_do_not_ask_for_the_file(
    tmp_path: Path, stage: str, more: tuple[str, ...]
) -> None:
    assert "images.json" in asked_for_plan(stage, tmp_path, *more, shown=(tmp_path,)).stderr


def test_paths_of_overrides_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings("tiny", overrides=["run.root=my runs"]).settings
    found = plan(settings, Request("target", "tiny"), caller=CALLER, built=built())[-1]
    assert f'run.root="{tmp_path}/my runs"' in sets(found)
    settings = load_settings("tiny", overrides=["prepare.input=../talks"]).settings
    found = plan(settings, Request("target", "tiny"), caller=CALLER, built=built())[-1]
    assert f'prepare.input="{tmp_path.parent}/talks"' in sets(found)
    assert "extract.server.python=/opt/cleanslate/bin/python" in sets(found)


def test_the_inner_settings_are_the_outer_ones_but_for_places() -> None:
    overrides = ("run.root=/data/runs", "train.epochs=2", "train.gpus=[4,5,6,7]")
    outer = load_settings("kimi-k2.5", overrides=overrides).settings.model_dump()
    inner = load_settings(
        "kimi-k2.5", overrides=sets(last("train", "kimi-k2.5", *overrides))
    ).settings.model_dump()
    assert inner["train"].pop("gpus") == (0, 1, 2, 3)
    assert outer["train"].pop("gpus") == (4, 5, 6, 7)
    assert inner["run"].pop("host") == Path("/run/cleanslate/host.yml")
    assert outer["run"].pop("host").name == "gpu_hosts.yml"
    assert inner["extract"]["server"].pop("python") == Path("/opt/cleanslate/bin/python")
    del outer["extract"]["server"]["python"]
    assert inner == outer


def test_the_run_is_in_the_labels_and_in_the_name() -> None:
    container = last("extract", "tiny")
    assert values(container, "--label") == [
        "cleanslate.run=/data/runs/tiny",
        "cleanslate.stage=extract",
        "cleanslate.version=9.9",
    ]
    elsewhere = last("extract", "tiny", "run.root=/other")
    assert container.name.startswith("cleanslate-tiny-extract-")
    assert container.name != elsewhere.name
    assert container.command[-4:] == (
        "--image-facts", "/run/cleanslate/images.json", "--container", container.name
    )  # fmt: skip


def test_showing_settings_touches_no_run() -> None:
    container = last("show", "tiny")
    assert not values(container, "--label")
    assert [mount.source for mount in container.mounts] == [CALLER.facts]
    assert "--image-facts" not in container.command


@pytest.mark.parametrize(
    "override",
    [
        "run.root=/",
        "run.root=/tmp",
        "run.root=/opt",
        "run.root=/opt/cleanslate",
        "prepare.input=/etc",
        "extract.staging=/tmp",
        "extract.staging=/dev",
    ],
)
def test_a_folder_that_would_hide_the_image_is_refused(override: str) -> None:
    with pytest.raises(ContainerError, match="would hide"):
        last("extract", "tiny", override)


@pytest.mark.parametrize("root", ["/srv/runs", "/opt/cleanslate/runs", "/usr/share/runs"])
def test_a_folder_below_one_of_the_image_is_not(root: str) -> None:
    assert last("extract", "tiny", f"run.root={root}").mounts


@pytest.mark.parametrize("override", ['prepare.input="/a\\nb"', "description='a\n\n  b'"])
def test_a_line_break_is_refused(override: str) -> None:
    with pytest.raises(ContainerError, match="line break"):
        last("prepare", "tiny", override)
