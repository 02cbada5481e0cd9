"""Stages in real containers: the same bytes as on the host, and nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.containers.plan import STAGES
from pipeline.slate.files import sha256_file
from pipeline.slate.manifest import Manifest
from pipeline.store.reader import StateDataset
from tests.adoption.conftest import write_request
from tests.containers.launcher import ROOT, ContainerRun, docker, good, local, press_ctrl_c, refused
from tests.stages.sealing import first_index, flip, place

LONG = ("--set", "train.epochs=2000")  # a training that a test has time to disturb
SHORT = ("--set", "train.epochs=100")  # half a minute: a loaded machine is in time to stop it


def finish(
    process: subprocess.Popen[str], *, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    out, error = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def test_every_stage_gives_the_bytes_of_a_local_run(whole: ContainerRun, tmp_path: Path) -> None:
    good(local(whole.profile, tmp_path, "evaluate"))
    for stage in STAGES[:6]:
        assert whole.digest(stage) == Manifest.read(tmp_path / "mine" / stage).digest, stage


def test_a_run_of_containers_is_continued_on_the_host_and_back(run: ContainerRun) -> None:
    output = good(local(run.profile, run.root, "evaluate"))
    assert "train is sealed and matches" in output
    assert "train is sealed and matches" in good(run.run("evaluate"))


def test_manifests_name_the_image_that_made_them(whole: ContainerRun) -> None:
    image = Manifest.read(whole.folder / "train").provenance["image"]
    assert image["name"].startswith("cleanslate-trainer:")
    assert docker("image", "inspect", "--format", "{{.Id}}", image["id"]).strip() == image["id"]
    assert image["inputs"]["docker/trainer/requirements.txt"] == sha256_file(
        ROOT / "docker" / "trainer" / "requirements.txt"
    )
    label = '{{index .Config.Labels "org.opencontainers.image.revision"}}'
    commit = docker("image", "inspect", "--format", label, image["id"]).strip()
    assert str(Manifest.read(whole.folder / "train").provenance["commit"]).startswith(commit)


def test_no_container_is_left(whole: ContainerRun) -> None:
    assert whole.containers() == []


def test_the_engine_says_that_nothing_is_privileged(run: ContainerRun) -> None:
    process = run.start("train", *LONG)
    found = run.running("train")
    host = found["HostConfig"]
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert host["Privileged"] is False
    assert (host["CapAdd"] or [], host["CapDrop"]) == ([], ["ALL"])
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["ReadonlyRootfs"], host["NetworkMode"], host["Init"]) == (True, "none", True)
    assert (host["PidMode"], host["IpcMode"], host["UTSMode"]) == ("", "private", "")
    assert (host["ShmSize"], host["PidsLimit"]) == (1 << 30, 16384)
    assert found["Config"]["User"] == f"{os.getuid()}:{os.getgid()}"
    assert found["Config"]["Labels"]["cleanslate.run"] == str(run.folder)
    written = [mount["Source"] for mount in found["Mounts"] if mount["RW"]]
    assert written == [str(run.root)]
    assert not [mount for mount in found["Mounts"] if "docker.sock" in mount["Source"]]


def test_inside_there_is_a_quota_no_network_and_nothing_to_write_to(run: ContainerRun) -> None:
    quota = 8 << 20
    process = run.start("extract", "--set", f"extract.staging_quota_bytes={quota}")
    name = run.running("extract")["Name"].removeprefix("/")
    ask = (
        "df -B1 --output=size /dev/shm/cleanslate | tail -n 1; ls /sys/class/net;"
        "for at in / /usr /opt/cleanslate /etc; do touch $at/x 2>&1; done;"
        "grep ^Cap /proc/self/status"
    )
    out = docker("exec", name, "sh", "-c", ask)
    finish(process)
    lines = out.split("\n")
    assert int(lines[0]) == quota + (2 << 30)
    assert lines[1] == "lo"
    assert [line.endswith("Read-only file system") for line in lines[2:6]] == [True] * 4
    assert {line.split()[1] for line in lines[6:] if line} == {"0" * 16}


def test_a_run_is_verified_and_wiped(run: ContainerRun) -> None:
    assert good(run.run("verify")).count(": whole ") == len(STAGES)
    assert "nothing of this project is left but its logs" in good(run.run("clean-slate"))
    assert sorted(path.name for path in run.folder.iterdir()) == [".lock", "logs"]


def test_files_belong_to_who_asked(stranger: tuple[ContainerRun, dict[str, Any]]) -> None:
    run, options = stranger
    good(run.run("prepare", **options))
    files = [run.root, *run.root.rglob("*")]
    assert len(files) > 5
    assert {(path.stat().st_uid, path.stat().st_gid) for path in files} == {(4242, 4243)}


def test_a_lost_row_is_named_as_json_and_captured_again(
    handed: tuple[ContainerRun, dict[str, Any]],
) -> None:
    run, options = handed
    output = run.folder / "extract"
    sealed, owner = run.digest("extract"), run.root.stat()
    found = json.loads(good(run.run("verify", "--json", **options)))
    assert found["whole"] is True
    assert [one["state"] for one in found["stages"]] == ["whole"] * len(STAGES)
    held = json.loads((run.folder / ".lock").read_text())  # a process id of there says nothing here
    assert (held["purpose"], held["container"][:16]) == ("verify", "cleanslate-mine-")
    index = first_index(output)
    lost = index.entries[3]
    flip(output / index.shard, place(lost, index.rows, "tap_1", 1))
    done = run.run("verify", "--json", **options)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["whole"] is False
    problems = [problem for one in found["stages"] for problem in one["problems"]]
    assert [bad["id"] for problem in problems for bad in problem["samples"]] == [lost.id]
    said = good(run.run("repair", **options))
    assert "repair: 1 samples in 1 shards are captured again" in said
    assert run.digest("extract") == sealed
    said = good(run.run("repair", **options))
    assert "nothing to repair, all that is sealed is whole" in said
    assert "captured again" not in said
    manifest = Manifest.read(output)
    [record] = manifest.provenance["repairs"]
    assert record["samples"] == {index.shard.removesuffix(".safetensors"): [lost.id]}
    files = [run.root, *run.root.rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in files} == {
        (owner.st_uid, owner.st_gid)
    }
    assert run.containers() == []


def old_dump(whole: ContainerRun, folder: Path) -> tuple[Path, Path]:
    """A dump of the states of a whole run, with a link in it, and the samples that it is of."""
    dataset, lines = StateDataset.open(whole.folder / "extract"), []
    for number, entry in enumerate(dataset.entries):
        one = dataset.read(entry)
        write_request(folder / "dump", number, [*one.taps, one.final])
        mask = one.supervised.int().tolist()
        lines.append(json.dumps({"input_ids": one.input_ids.tolist(), "loss_mask": mask}) + "\n")
    (folder / "dump" / "req_99").symlink_to("/")
    (folder / "old.jsonl").write_text("".join(lines))
    return folder / "dump", folder / "old.jsonl"


def bytes_and_times(folder: Path) -> dict[Path, tuple[int, str]]:
    """Time of change and digest of all that lies below a folder."""
    return {
        path: (path.lstat().st_mtime_ns, sha256_file(path) if path.is_file() else "")
        for path in sorted(folder.rglob("*"))
    }


def test_a_dump_is_adopted_as_on_the_host_and_need_not_be_there_any_more(
    whole: ContainerRun, run: ContainerRun, tmp_path: Path
) -> None:
    run.folder.rename(tmp_path / "other run")
    host = tmp_path / "host" / run.folder.name
    for folder in (run.folder, host):
        shutil.copytree(whole.folder / "target", folder / "target")
    disk = tmp_path / "old disk"
    dump, samples = old_dump(whole, disk)
    (tmp_path / "disk").symlink_to(disk)
    (tmp_path / "aside").mkdir()  # no container sees it
    given = tmp_path / "aside" / ".." / "disk"
    options = ("--dump", str(given / dump.name), "--samples", str(given / samples.name))
    before = bytes_and_times(disk)
    process = run.start("adopt", *options)
    mounts = run.created("adopt", process)["Mounts"]
    good(finish(process, seconds=600))
    assert bytes_and_times(disk) == before
    seen = {mount["Destination"]: mount["RW"] for mount in mounts}
    assert [path for path, writable in seen.items() if writable] == [str(run.root)]
    assert seen[str(tmp_path / "disk" / "dump")] is False
    assert "/" not in seen
    good(local(whole.profile, host.parent, "adopt", *options))
    assert run.digest("extract") == Manifest.read(host / "extract").digest
    counts = Manifest.read(run.folder / "extract").counts["dump"]
    assert counts == {"found": 38, "adopted": 37, "refused": {"link": 1}}
    disk.rename(tmp_path / "away")
    said = good(run.run("train"))
    assert f"extract was adopted from {tmp_path / 'disk' / 'dump'}: following that" in said
    assert run.containers() == []


@pytest.mark.parametrize("press", [True, False], ids=["Ctrl-C", "SIGTERM"])
def test_a_stop_reaches_the_stage_and_a_resume_ends_as_if_there_was_none(
    run: ContainerRun, press: bool
) -> None:
    good(run.run("train", *SHORT))
    wanted = run.digest("train")
    process = run.start("train", *SHORT)
    run.running("train")
    press_ctrl_c(process) if press else process.send_signal(signal.SIGTERM)
    error = refused(finish(process), status=130 if press else 143)
    assert "stopped before the end; nothing was sealed" in error
    assert run.containers() == []
    good(run.run("train", *SHORT, "--resume"))
    assert run.digest("train") == wanted


def test_a_container_of_a_killed_launcher_is_named_and_released(run: ContainerRun) -> None:
    process = run.start("train", *LONG)
    name = run.running("train")["Name"].removeprefix("/")
    os.killpg(process.pid, signal.SIGKILL)
    with process:  # closes its pipes
        process.wait()
    assert run.containers() == [name]
    error = refused(run.run("train", *LONG))
    assert name in error
    assert "make release" in error
    output = good(run.run("release"))
    assert f"{name} is gone" in output
    assert run.containers() == []
    assert "no container" in good(run.run("release"))
    assert not (run.folder / "train" / "manifest.json").exists()
    assert (run.folder / "extract" / "manifest.json").exists()


def test_a_second_start_is_refused_and_the_first_goes_on(run: ContainerRun) -> None:
    process = run.start("train", *SHORT)
    name = run.running("train")["Name"].removeprefix("/")
    docker("pause", name)  # else it may end while the others are being refused
    assert f"a container of this run is there: {name} (" in refused(run.run("evaluate"))
    on_host = local(run.profile, run.root, "train")
    docker("unpause", name)
    assert f'is in use by {{"container": "{name}", "purpose": "train"}}' in refused(on_host)
    assert "sealed in" in good(finish(process))


def test_release_touches_no_other_run(run: ContainerRun, whole: ContainerRun) -> None:
    process = run.start("train", *LONG)
    names = [run.running("train")["Name"].removeprefix("/")]
    assert "no container" in good(whole.run("release"))
    assert run.containers() == names
    process.send_signal(signal.SIGTERM)
    finish(process)


def test_a_fault_of_the_stage_keeps_its_words_and_its_status(run: ContainerRun) -> None:
    error = refused(run.run("extract", "--set", "extract.taps=[1,3,40]"))
    assert "extract.taps names layer 40, the target has 6" in error
    assert run.containers() == []


def test_gpus_are_refused_by_images_that_are_for_none(run: ContainerRun) -> None:
    error = refused(run.run("train", "--set", "train.gpus=[0]"))
    assert "is the variant for machines without a GPU" in error
    assert run.containers() == []


def test_another_machines_engine_is_refused(run: ContainerRun) -> None:
    environment = {"PATH": os.environ["PATH"], "DOCKER_HOST": "tcp://192.0.2.1:2375"}  # noqa: TID251
    error = refused(run.run("train", env=environment))
    assert "tcp://192.0.2.1:2375" in error
    assert "unset DOCKER_HOST" in error


def test_a_profile_that_is_not_there_is_said_as_on_the_host(run: ContainerRun) -> None:
    run.profile = run.root / "absent.yaml"
    assert "absent.yaml' does not exist" in refused(
        subprocess.run(
            run.arguments("train"), cwd=ROOT, capture_output=True, text=True, check=False
        )
    )


def test_code_that_the_image_has_not_is_refused(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for part in ("docker/run.sh", "VERSION", "images/images.json"):
        (tree / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, tree / part)
    shutil.copytree(ROOT / "pipeline", tree / "pipeline")
    with (tree / "pipeline" / "cli.py").open("a") as file:
        file.write("# changed\n")
    done = subprocess.run(
        ["bash", str(tree / "docker" / "run.sh"), "show"],
        cwd=tree, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 files of pipeline/ differ (first: cli.py)" in refused(done)
    (tree / "VERSION").write_text("99.0.0\n")
    done = subprocess.run(
        ["bash", str(tree / "docker" / "run.sh"), "show"],
        cwd=tree, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "make images" in refused(done)
