"""export: the trained drafter in the layout that SGLang and vLLM load, read back and compared."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.draft.config import DrafterConfig
from pipeline.draft.export import (
    EXPORT_DTYPE,
    Origin,
    export_drafter,
    export_tensors,
    load_exported,
)
from pipeline.draft.model import Drafter
from pipeline.slate.log import SAY
from pipeline.slate.stage import Outcome, Workspace
from pipeline.stages.errors import NotProven
from pipeline.stages.run import Run
from pipeline.stages.train import sealed_checkpoint, token_digest
from pipeline.store.index import Entry
from pipeline.store.reader import StateDataset

_ROWS = 64  # compared after reading back


class ExportStage:
    """Writes the drafter's folder and proves that reading it gives the same logits."""

    name = "export"
    gpus: tuple[int, ...] = ()

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def inputs(self) -> Mapping[str, Path]:
        """Checkpoint, the states it was trained on, and the target when it is made here."""
        return {
            **self._run.target_inputs(),
            "extract": self._run.output("extract"),
            "train": self._run.output("train"),
        }

    @property
    def decides(self) -> Mapping[str, Any]:
        """Only the target besides the inputs."""
        return {"target": self._run.target_decides()}

    @property
    def environment(self) -> Mapping[str, str]:
        """It has no children."""
        return {}

    def check(self) -> int:
        """The last checkpoint is complete and holds what both servers read."""
        checkpoint = sealed_checkpoint(self._run.output("train"))
        export_tensors(
            *checkpoint.model(),
            DrafterConfig.from_json(checkpoint.drafter),
            target=self._run.target_facts(),
            taps=StateDataset.open(self._run.output("extract")).taps,
        )
        return (checkpoint.folder / "model.safetensors").stat().st_size + (64 << 20)

    def run(self, workspace: Workspace) -> None:
        """Writes weights and config."""
        checkpoint = sealed_checkpoint(self._run.output("train"))
        masters, vocabulary = checkpoint.model()
        dataset = StateDataset.open(self._run.output("extract"))
        report = export_drafter(
            workspace.output,
            masters,
            vocabulary,
            DrafterConfig.from_json(checkpoint.drafter),
            target=self._run.target_facts(),
            taps=dataset.taps,
            trained_length=longest_trained(dataset.entries),
            origin=Origin(dataset.target_fingerprint, token_digest(self._run.tokenizer())),
        )
        SAY.info(
            "export: %d tensors, %.1f M parameters; layer ids by server: %s",
            report.tensors,
            report.parameters / 1e6,
            report.layer_ids,
        )
        for notice in report.notices:
            SAY.warning("export: %s", notice)

    def verify(self, workspace: Workspace) -> Outcome:
        """The export as read back gives bit for bit the logits of the checkpoint in bfloat16."""
        checkpoint = sealed_checkpoint(self._run.output("train"))
        masters, vocabulary = checkpoint.model()
        loaded, read_vocabulary, config = load_exported(workspace.output)
        wanted = Drafter(DrafterConfig.from_json(checkpoint.drafter)).to(EXPORT_DTYPE).eval()
        wanted.load_state_dict(masters)
        if not torch.equal(probe(loaded), probe(wanted)) or not vocabulary.same_as(read_vocabulary):
            raise NotProven(
                f"{workspace.output}: logits or vocabulary differ from {checkpoint.folder.name}",
                wanted="the same bits after reading the export back",
                next_step="make export starts over; if it stays so, report it",
            )
        SAY.info("export: read back, the same logits on %d rows: %s", _ROWS, workspace.output)
        return Outcome(
            counts={"tensors": len(masters) + 2},
            facts={
                "checkpoint": checkpoint.folder.name,
                "taps": list(config.taps),
                "draft_vocabulary_size": config.draft_vocabulary_size,
                "max_position_embeddings": config.max_position_embeddings,
            },
        )


def longest_trained(entries: Iterable[Entry]) -> int:
    """Tokens of the longest sample that was trained on; held-out samples do not count."""
    return max(entry.length for entry in entries if entry.split == "train")


@torch.inference_mode()
def probe(model: Drafter) -> Tensor:
    """Logits [64, D] of fixed random rows that pass through every weight of the drafter.

    Each row attends to itself alone, so its attention output is its own value.
    """
    config = model.config
    generator = torch.Generator().manual_seed(0)
    dtype = model.lm_head.weight.dtype
    taps = torch.randn(_ROWS, 3 * config.target_hidden_size, generator=generator).to(dtype)
    embeds = torch.randn(_ROWS, config.hidden_size, generator=generator).to(dtype)
    fused = model.fuse(taps)
    query, key, value = model.qkv(fused, embeds)
    # Query and key do not reach the output of a row that sees only itself; they are added instead.
    groups = config.heads // config.kv_heads
    shared = (key + value).repeat_interleave(groups, dim=1)
    return model.logits(model.finish(fused, query + shared))
