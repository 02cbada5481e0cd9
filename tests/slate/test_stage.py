import fcntl
import importlib.util
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.host.errors import HostError
from pipeline.host.gpus import Gpu, GpuFacts, GpuProcess, read_gpus
from pipeline.host.wanted import Wanted
from pipeline.slate.errors import LockHeld, NotSealed, SlateError, WipeRefused
from pipeline.slate.lock import lock
from pipeline.slate.manifest import Manifest
from pipeline.slate.place import Place
from pipeline.slate.stage import ensure, gpu_problems, perform
from pipeline.slate.wipe import MANIFEST
from tests.processes import hear_ctrl_c

SCRIPT = Path(__file__).with_name("demo_stage.py")
_SPEC = importlib.util.spec_from_file_location("demo_stage", SCRIPT)
assert _SPEC
assert _SPEC.loader
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
DemoStage = _MODULE.DemoStage


def run(root: Path, stage: DemoStage, *, resume: bool = False) -> Manifest:
    return perform(stage, root=root, resume=resume, threads=2)


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(root), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stage_that_succeeds_is_sealed_with_files_counts_and_provenance(tmp_path: Path) -> None:
    manifest = run(tmp_path, DemoStage())
    read = Manifest.read(tmp_path / "demo")
    assert read.digest == manifest.digest
    assert read.counts == {"pieces": 5}
    assert set(read.files) == {f"piece-{number}" for number in range(5)}
    assert read.files["piece-0"].bytes == 1000
    assert read.provenance["host"]["cores"] >= 1
    assert read.provenance["log"].endswith(".log")


def test_asked_for_by_name_it_starts_over_and_gives_the_same_digest(tmp_path: Path) -> None:
    first = run(tmp_path, DemoStage())
    (tmp_path / "demo" / "stale").write_text("from an earlier run")
    second = run(tmp_path, DemoStage())
    assert first.digest == second.digest
    assert not (tmp_path / "demo" / "stale").exists()


def test_a_fault_known_beforehand_leaves_the_old_output(tmp_path: Path) -> None:
    first = run(tmp_path, DemoStage())
    with pytest.raises(SlateError, match="no tokenizer"):
        run(tmp_path, DemoStage(pieces=3, check="no tokenizer"))
    assert Manifest.read(tmp_path / "demo").digest == first.digest


def test_too_little_room_is_found_before_the_wipe(tmp_path: Path) -> None:
    first = run(tmp_path, DemoStage())
    with pytest.raises(SlateError, match="MiB free"):
        run(tmp_path, DemoStage(room=1 << 60))
    assert Manifest.read(tmp_path / "demo").digest == first.digest


def test_a_clock_that_is_set_back_meanwhile_gives_no_negative_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(2_000_000_000, 0, -86_400))  # a day earlier each time it is asked
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    assert run(tmp_path, DemoStage()).provenance["seconds"] >= 0


def test_a_folder_in_which_only_a_half_written_marker_lies_is_taken(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "..cleanslate.json.partial").write_bytes(b'{"pro')  # killed while claiming
    assert run(tmp_path, DemoStage()).counts == {"pieces": 5}


def test_what_a_library_was_writing_under_a_hidden_name_is_gone_after_a_resume(
    tmp_path: Path,
) -> None:
    with pytest.raises(RuntimeError):
        run(tmp_path, DemoStage(fail=True))
    (tmp_path / "demo" / ".tmpZHOtrH").write_bytes(b"half a safetensors file")
    assert run(tmp_path, DemoStage(), resume=True).digest == run(tmp_path, DemoStage()).digest


def test_a_failing_run_seals_nothing_and_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run(tmp_path, DemoStage(fail=True))
    assert not (tmp_path / "demo" / MANIFEST).exists()
    resumed = run(tmp_path, DemoStage(), resume=True)
    assert resumed.digest == run(tmp_path / "other", DemoStage()).digest


def test_what_a_killed_run_left_half_written_is_gone_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run(tmp_path, DemoStage(fail=True))
    (tmp_path / "demo" / ".piece-9.partial").write_bytes(b"half")
    run(tmp_path, DemoStage(), resume=True)
    assert not (tmp_path / "demo" / ".piece-9.partial").exists()


def test_a_partial_file_is_never_sealed(tmp_path: Path) -> None:
    class Careless(DemoStage):
        def run(self, workspace: object) -> None:
            super().run(workspace)
            (tmp_path / "demo" / ".left.partial").write_bytes(b"half")

    with pytest.raises(SlateError, match="partial"):
        run(tmp_path, Careless())
    assert not (tmp_path / "demo" / MANIFEST).exists()


def test_a_sealed_output_is_not_resumed_but_kept(tmp_path: Path) -> None:
    first = run(tmp_path, DemoStage())
    again = run(tmp_path, DemoStage(), resume=True)
    assert again.provenance == first.provenance


def test_an_unfinished_output_of_other_settings_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run(tmp_path, DemoStage(pieces=3, fail=True))
    with pytest.raises(NotSealed, match="pieces: found 3, wanted 5"):
        run(tmp_path, DemoStage(pieces=5), resume=True)


def test_a_directory_of_somebody_else_is_never_taken(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("x")
    with pytest.raises(WipeRefused):
        run(tmp_path, DemoStage())
    assert (tmp_path / "demo" / "thesis.tex").read_text() == "x"


def test_a_run_folder_that_cannot_be_written_is_refused_by_name() -> None:
    with pytest.raises(SlateError, match="/proc/nowhere"):
        run(Path("/proc/nowhere"), DemoStage())


def test_a_stage_without_gpus_says_what_the_machine_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, DemoStage())
    said = capsys.readouterr().out
    assert "GPUs: none wanted by this stage (" in said


def test_every_start_has_a_log_of_its_own(tmp_path: Path) -> None:
    run(tmp_path, DemoStage())
    first = {path: path.read_text() for path in (tmp_path / "logs").iterdir()}
    run(tmp_path, DemoStage())
    assert len(list((tmp_path / "logs").iterdir())) == 2
    assert all(path.read_text() == text for path, text in first.items())


def test_two_at_once_are_refused_and_the_holder_is_named(tmp_path: Path) -> None:
    with lock(tmp_path, purpose="extract"), pytest.raises(LockHeld, match='"purpose": "extract"'):
        run(tmp_path, DemoStage())


def test_a_killed_holders_lock_is_waited_for_while_a_child_of_it_starts(tmp_path: Path) -> None:
    forked = """
import os, sys, time
from pathlib import Path
from pipeline.slate.lock import lock
with lock(Path(sys.argv[1]), purpose="extract"):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", forked, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with (tmp_path / ".lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock(tmp_path, purpose="train"):
        assert '"train"' in (tmp_path / ".lock").read_text()


@pytest.mark.parametrize("seed", range(8))
def test_kill_9_at_any_moment_leaves_the_old_output_or_nothing_sealed(
    tmp_path: Path, seed: int
) -> None:
    old = run(tmp_path, DemoStage(pieces=4))
    process = start(tmp_path, "--pieces", "6", "--pause", "0.05")
    time.sleep(random.Random(seed).uniform(0.2, 1.2))  # noqa: S311
    process.kill()
    process.communicate()
    if (tmp_path / "demo" / MANIFEST).exists():
        sealed = Manifest.read(tmp_path / "demo")
        assert sealed.counts["pieces"] in (4, 6)
        if sealed.counts["pieces"] == 4:
            assert sealed.digest == old.digest
        present = {p.name for p in (tmp_path / "demo").iterdir()} - {MANIFEST, ".cleanslate.json"}
        assert set(sealed.files) == present
    elif (tmp_path / "demo" / ".cleanslate.json").exists() and (
        list((tmp_path / "demo").glob("piece-*"))
    ):
        resumed = run(tmp_path, DemoStage(pieces=6), resume=True)
        assert resumed.counts["pieces"] == 6
    assert run(tmp_path, DemoStage(pieces=6)).counts["pieces"] == 6


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_stopped_it_says_so_and_a_resume_equals_an_uninterrupted_run(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    process = start(tmp_path, "--pieces", "40", "--pause", "0.05")
    wait_for(tmp_path / "demo" / "piece-1")
    process.send_signal(sent)
    _, error = process.communicate(timeout=30)
    assert process.returncode == status
    assert "RESUME=1" in error
    assert "Traceback" not in error
    assert not (tmp_path / "demo" / MANIFEST).exists()
    resumed = run(tmp_path, DemoStage(pieces=40), resume=True)
    assert resumed.digest == run(tmp_path / "other", DemoStage(pieces=40)).digest


def test_an_error_shows_no_traceback_but_its_log_has_it(tmp_path: Path) -> None:
    process = start(tmp_path, "--fail")
    _, error = process.communicate(timeout=30)
    assert process.returncode == 70
    assert "unexpected RuntimeError: (no message)" in error
    assert "Traceback" not in error
    [log] = (tmp_path / "logs").iterdir()
    assert "Traceback" in log.read_text()


def test_a_full_disk_seals_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))

    process = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        preexec_fn=small_files,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert "File too large" in process.stderr
    assert "make room" in process.stderr
    assert not (tmp_path / "demo" / MANIFEST).exists()


class Reader(DemoStage):
    name = "reader"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 999 bytes"),
        (lambda path: path.write_bytes(b"\x03" + path.read_bytes()[1:]), "has other bytes"),
        (lambda path: path.unlink(), "is gone"),
    ],
)
def test_an_input_that_changed_after_its_seal_is_refused(
    tmp_path: Path, change, words: str
) -> None:
    run(tmp_path, DemoStage())
    change(tmp_path / "demo" / "piece-2")
    with pytest.raises(NotSealed, match=f"piece-2 {words}"):
        run(tmp_path, Reader(inputs={"demo": tmp_path / "demo"}))
    assert not (tmp_path / "reader").exists()


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    run(tmp_path, DemoStage())
    path = tmp_path / "demo" / MANIFEST
    path.write_text(path.read_text().replace('"pieces": 5', '"pieces": 6', 1))
    with pytest.raises(NotSealed, match="its own digest"):
        run(tmp_path, Reader(inputs={"demo": tmp_path / "demo"}))


def test_a_needed_stage_is_run_when_absent_and_reused_when_it_matches(tmp_path: Path) -> None:
    ensure(DemoStage(), root=tmp_path, threads=1)
    first = Manifest.read(tmp_path / "demo")
    ensure(DemoStage(), root=tmp_path, threads=1)
    assert Manifest.read(tmp_path / "demo").provenance == first.provenance


def test_a_needed_stage_of_other_settings_stops_and_says_what_differs(tmp_path: Path) -> None:
    run(tmp_path, DemoStage(pieces=5))
    with pytest.raises(NotSealed, match=r"settings\.pieces: found 5, wanted 7") as caught:
        ensure(DemoStage(pieces=7), root=tmp_path, threads=1)
    assert "make demo" in caught.value.next_step
    assert Manifest.read(tmp_path / "demo").counts["pieces"] == 5


def test_a_stage_that_wants_gpus_does_not_start_without_them(tmp_path: Path) -> None:
    if read_gpus().gpus:
        pytest.skip("this machine has GPUs")
    run(tmp_path, DemoStage())
    with pytest.raises(SlateError, match="no NVIDIA driver"):
        run(tmp_path, DemoStage(gpus=(0,)))
    assert (tmp_path / "demo" / MANIFEST).exists()


def ready_host(folder: Path) -> Place:
    names = [name for name in Wanted.model_fields if name != "states_tmpfs"]
    size = f"{{path: {folder}/absent, bytes: 1048576}}"
    lines = [f"  states_tmpfs: {size}", *(f"  {name}: null" for name in names)]
    (folder / "host.yml").write_text("\n".join(["ready_host:", *lines]))
    return Place(wanted=folder / "host.yml")


def test_a_host_that_is_not_ready_is_refused_before_the_wipe(tmp_path: Path) -> None:
    stage, place = DemoStage(), ready_host(tmp_path)
    stage.name = "extract"  # which needs a tmpfs
    before = run(tmp_path, stage)
    with pytest.raises(HostError, match=f"HOST-TMPFS-MISSING {tmp_path}/absent"):
        perform(stage, root=tmp_path, resume=False, threads=2, place=place)
    assert Manifest.read(tmp_path / "extract").digest == before.digest
    again = perform(stage, root=tmp_path, resume=True, threads=2, place=place)
    assert again.provenance == before.provenance


def test_a_stage_that_needs_nothing_of_the_host_runs_on_any(tmp_path: Path) -> None:
    place = ready_host(tmp_path)
    assert perform(DemoStage(), root=tmp_path, resume=False, threads=2, place=place).counts


HELD = Gpu(1, "RTX PRO 6000", 636, 97887, (GpuProcess(4242, 600, "python -m sglang"),))
UNSEEN = Gpu(2, "RTX PRO 6000", 90000, 97887, ())
FREE = Gpu(0, "RTX PRO 6000", 0, 97887, ())


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ((0,), []),
        ((1,), ["GPU 1", "600 MiB", "PID 4242", "python -m sglang"]),
        ((2,), ["GPU 2", "90000 MiB", "no process that is visible"]),
        ((7,), ["GPU 7 is not there"]),
    ],
)
def test_gpus_that_are_held_are_named_with_holder_and_mib(
    wanted: tuple[int, ...], words: list[str]
) -> None:
    problems = gpu_problems(GpuFacts((FREE, HELD, UNSEEN), "580", None), wanted)
    assert bool(problems) == bool(words)
    assert all(word in " ".join(problems) for word in words)
