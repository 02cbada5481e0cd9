"""Stages get the host's NCCL variables, and are refused before anything is wiped."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.nccl.errors import NcclError
from pipeline.settings.load import load_settings
from pipeline.slate.stage import Outcome, Workspace, perform
from pipeline.slate.wipe import MANIFEST
from pipeline.stages.extract_server import environment_of
from pipeline.stages.plan import STAGES, check_environments, run_stage
from pipeline.stages.run import Run
from pipeline.stages.serve import serve_run
from pipeline.stages.server import ServerPlan, plan_environment
from pipeline.stages.train import TrainStage

EXTRACTION = {"NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": "LOC"}
TRAINING = {"NCCL_PROTO": "Simple", "NCCL_BUFFSIZE": "16777216"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The server and two ranks on two GPUs, on a host with a file."""
    path = tmp_path / "nccl.json"
    path.write_text(json.dumps({"extraction": EXTRACTION, "training": TRAINING}))
    profile = tmp_path / "two.yaml"
    profile.write_text(f"""
extends: tiny-sglang
run: {{root: {tmp_path}, nccl: nccl.json}}
extract: {{gpus: [0, 1], server: {{device: cuda, tensor_parallel: 2}}}}
train: {{ranks: 2, gpus: [0, 1], nccl: {{NCCL_DEBUG: WARN}}}}
evaluate: {{engine: sglang, gpus: [0, 1]}}
""")
    return Run(load_settings(str(profile)).settings)


def of_nccl(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("NCCL_")}


def test_training_gets_what_is_for_training_and_its_own(run: Run) -> None:
    assert of_nccl(TrainStage(run).environment) == {**TRAINING, "NCCL_DEBUG": "WARN"}


def test_servers_get_what_is_for_extraction(run: Run, tmp_path: Path) -> None:
    assert of_nccl(environment_of(run, staging=tmp_path)) == EXTRACTION
    plan = ServerPlan("bfloat16", gpus=run.settings.evaluate.gpus)
    assert of_nccl(plan_environment(run, plan)) == EXTRACTION


@pytest.mark.parametrize("use", ["extraction", "training", "evaluation"])
def test_every_stage_on_gpus_needs_the_file(run: Run, tmp_path: Path, use: str) -> None:
    assert run.settings.run.nccl is not None
    run.settings.run.nccl.unlink()
    plan = ServerPlan("bfloat16", gpus=run.settings.evaluate.gpus)
    ask = {
        "extraction": lambda: environment_of(run, staging=tmp_path),
        "training": lambda: TrainStage(run).environment,
        "evaluation": lambda: plan_environment(run, plan),
    }
    with pytest.raises(NcclError, match=r"run\.nccl cannot be read: "):
        ask[use]()


class Refused:
    """A stage whose environment cannot be made once `path` is no file of winners."""

    name = "refused"
    gpus = ()
    inputs: Mapping[str, Path] = {}
    decides: Mapping[str, str] = {}

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def environment(self) -> dict[str, str]:
        return self._run.nccl("training", explicit={}, gpus=(0, 1))

    def check(self) -> int:
        return 0

    def run(self, workspace: Workspace) -> None:
        (workspace.output / "file").write_text("made")

    def verify(self, workspace: Workspace) -> Outcome:
        return Outcome(counts={}, facts={})


def test_a_file_that_cannot_be_used_is_refused_before_the_wipe(run: Run, tmp_path: Path) -> None:
    assert run.settings.run.nccl is not None
    manifest = perform(Refused(run), root=tmp_path, resume=False, threads=1)
    assert manifest.provenance["environment"] == TRAINING
    run.settings.run.nccl.write_text("{}")
    with pytest.raises(NcclError):
        perform(Refused(run), root=tmp_path, resume=False, threads=1)
    assert (tmp_path / "refused" / MANIFEST).is_file()
    assert (tmp_path / "refused" / "file").read_text() == "made"


@pytest.mark.parametrize("name", ["extract", "train", "evaluate", "report"])
def test_a_missing_file_is_said_before_the_first_stage(run: Run, tmp_path: Path, name: str) -> None:
    assert run.settings.run.nccl is not None
    run.settings.run.nccl.unlink()
    with pytest.raises(NcclError):
        run_stage(name, run, resume=False)
    assert not run.folder.exists()


def sealed_in_name(run: Run, *names: str) -> None:
    for name in names:
        (run.folder / name).mkdir(parents=True)
        (run.folder / name / MANIFEST).touch()


def test_a_server_on_two_gpus_needs_the_file_before_anything_else(run: Run) -> None:
    assert run.settings.run.nccl is not None
    sealed_in_name(run, *STAGES)
    run.settings.run.nccl.unlink()
    with pytest.raises(NcclError):
        serve_run(run)


def test_a_server_on_one_gpu_needs_the_file_where_its_drafter_is_to_be_trained_on_two(
    tmp_path: Path, run: Run
) -> None:
    one = ("extract.gpus=[0]", "evaluate.gpus=[0]", "extract.server.tensor_parallel=1")
    alone = Run(load_settings(str(tmp_path / "two.yaml"), overrides=one).settings)
    assert run.settings.run.nccl is not None
    run.settings.run.nccl.unlink()
    with pytest.raises(NcclError):
        serve_run(alone)
    assert not alone.folder.exists()


def test_a_sealed_output_is_left_alone_without_the_file(run: Run) -> None:
    assert run.settings.run.nccl is not None
    sealed_in_name(run, "target", "prepare", "extract")
    run.settings.run.nccl.unlink()
    check_environments(["target", "prepare", "extract"], run)
    with pytest.raises(NcclError):
        check_environments(["target", "prepare", "extract"], run, anew="extract")
