"""How the target is served for answers: refused before a model is loaded in vain."""

from pathlib import Path

import pytest

from pipeline.settings.load import load_settings
from pipeline.stages.errors import StageError
from pipeline.stages.run import Run
from pipeline.stages.server import ServerPlan, plan_flags


def run_on(device: str, root: Path) -> Run:
    gpus = "[0]" if device == "cuda" else "[]"
    pairs = [f"extract.server.device={device}", f"extract.gpus={gpus}", f"run.root={root}"]
    return Run(load_settings("tiny-sglang", overrides=pairs).settings)


def test_float32_on_gpus_is_refused_and_the_settings_named(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="float32 for a server on GPUs") as refused:
        plan_flags(run_on("cuda", tmp_path), ServerPlan("float32", gpus=(0,)))
    assert "evaluate.compute_dtype" in refused.value.next_step


def test_other_pairs_of_precision_and_device_are_served(tmp_path: Path) -> None:
    for device, dtype in (("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16")):
        assert dtype in plan_flags(run_on(device, tmp_path), ServerPlan(dtype, gpus=()))
