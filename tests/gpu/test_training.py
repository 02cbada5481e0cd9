"""Training on GPUs: the same loss and gradients as on the CPU, and a whole run on two of them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.draft.model import Drafter
from pipeline.draft.ttt import Pack, pack_loss
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.slate.manifest import Manifest
from pipeline.training.batches import move
from tests.draft.make import make_config, make_drafter, make_pack

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def last_share(lengths: list[int], share: float) -> list[bool]:
    """The last share of every document is supervised."""
    starts = [round(length * (1 - share)) for length in lengths]
    return [
        at >= start for length, start in zip(lengths, starts, strict=True) for at in range(length)
    ]


def as_float(
    pack: Pack, embedding: Tensor, head: Tensor, vocabulary: DraftVocabulary
) -> tuple[Pack, Tensor, Tensor, DraftVocabulary]:
    pack = replace(pack, taps=pack.taps.float(), final=pack.final.float())
    return pack, embedding.float(), head.float(), vocabulary


def computed(
    model: Drafter, pack: Pack, frozen: list[Tensor], vocabulary: DraftVocabulary
) -> tuple[float, list[Tensor]]:
    """Loss sum and gradients, on the CPU in float64, by the device that the model is on."""
    device = next(model.parameters()).device
    result = pack_loss(
        model,
        move(pack, device),
        embedding=frozen[0].to(device),
        teacher_head=frozen[1].to(device),
        draft_vocabulary=vocabulary,
        steps=4,
        decay=0.8,
    )
    gradients = torch.autograd.grad(result.loss, list(model.parameters()))
    return float(result.loss.detach()), [gradient.double().cpu() for gradient in gradients]


def test_loss_and_gradients_are_those_of_the_cpu_for_packs_of_every_size() -> None:
    config = make_config(
        hidden_size=64, target_hidden_size=64, intermediate_size=96, head_dim=16,
        draft_vocabulary_size=32, target_vocabulary_size=64, max_position_embeddings=4096,
    )  # fmt: skip
    here = make_drafter(config).float()
    there = make_drafter(config).float().cuda()
    packs = [
        ([40], 0.5), ([300, 20, 500], 0.3), ([900], 0.02), ([130, 130], 0.9), ([17] * 30, 0.4),
        ([2000], 1.0), ([6], 0.5), ([128], 1.0), ([129], 1.0), ([1500, 1500], 0.05),
    ]  # fmt: skip
    for number, (lengths, share) in enumerate(packs):
        made = make_pack(config, lengths, last_share(lengths, share), seed=number)
        pack, *frozen, vocabulary = as_float(*made)
        wanted, slopes = computed(here, pack, frozen, vocabulary)
        found, others = computed(there, pack, frozen, vocabulary)
        assert found == pytest.approx(wanted, rel=1e-4), (lengths, share)
        for one, other in zip(others, slopes, strict=True):
            assert float((one - other).norm()) <= 2e-3 * float(other.norm()), (lengths, share)


def test_a_whole_run_on_two_gpus_leaves_them_empty(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    flags = str(pytestconfig.getoption("--sglang-flags")).split()
    profile = tmp_path / "gpus.yaml"
    profile.write_text(
        f"""
extends: tiny-sglang
run: {{root: {tmp_path / "runs"}, name: run}}
extract:
  staging: {tmp_path / "staging"}
  gpus: [0, 1]
  server:
    python: {pytestconfig.getoption("--sglang-python")}
    device: cuda
    tensor_parallel: 2
    extra_arguments: {flags}
train: {{gpus: [0, 1], ranks: 2, compute_dtype: bfloat16}}
evaluate: {{engine: sglang, gpus: [0, 1], compute_dtype: bfloat16, compare_loop: false}}
"""
    )
    for stage in ("extract", "train", "evaluate"):
        done = subprocess.run(
            [sys.executable, "-m", "pipeline.cli", stage, "--profile", str(profile)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        sys.stdout.write("\n".join(done.stdout.splitlines()[-12:]) + "\n")
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        manifest = Manifest.read(tmp_path / "runs" / "run" / stage)
        assert "no process" in done.stdout
        assert manifest.stage == stage
