"""What all stages of a run share: its settings, folders and target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipeline.conversations.normalise import Skip
from pipeline.nccl.cases import Use
from pipeline.nccl.profile import environment_for
from pipeline.settings.environment import available_cores, stage_environment
from pipeline.settings.model import Folder, Settings
from pipeline.slate.place import HOST, Place
from pipeline.stages.errors import StageError
from pipeline.target.facts import TargetFacts, fingerprint, read_facts
from pipeline.target.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Run:
    """One run: where it lies and with which settings.

    origins: dotted key -> where its value comes from, for the report. place: the container that
    this process runs in, if any.
    """

    settings: Settings
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)
    place: Place = field(default=HOST, hash=False)

    @property
    def folder(self) -> Path:
        """The run's folder, absolute; every stage has its output below it."""
        return self.settings.folder

    @property
    def threads(self) -> int:
        """CPU threads that this run may use."""
        return self.settings.run.threads or available_cores()

    def output(self, stage: str) -> Path:
        """Folder of a stage's output."""
        return self.folder / stage

    @property
    def made_target(self) -> bool:
        """Whether the target is made by this project's target stage."""
        return not isinstance(self.settings.target.source, Folder)

    @property
    def target_folder(self) -> Path:
        """The target's Hugging Face folder."""
        source = self.settings.target.source
        return source.path.absolute() if isinstance(source, Folder) else self.output("target")

    def target_inputs(self) -> dict[str, Path]:
        """The target as a sealed input, when a stage makes it."""
        return {"target": self.output("target")} if self.made_target else {}

    def target_decides(self) -> dict[str, Any]:
        """What of the target decides an output: its fingerprint, when it is somebody else's."""
        values: dict[str, Any] = {"remote_code": self.settings.target.remote_code}
        if not self.made_target:
            values["fingerprint"] = fingerprint(self.target_folder)
        return values

    def target_facts(self) -> TargetFacts:
        """Sizes of the target. TargetError when its folder is not one."""
        return read_facts(self.target_folder)

    @cached_property
    def known_ids(self) -> int:
        """Rows of the target's embedding: token ids lie below it."""
        return self.target_facts().vocabulary_size

    def beyond_embedding(self, ids: Sequence[int]) -> Skip | None:
        """Why ids cannot be run: some tokenizers know more tokens than their target."""
        most = self.known_ids
        if max(ids, default=0) < most:
            return None
        return Skip("beyond_embedding", f"token id {max(ids)}, the target knows 0 to {most - 1}")

    def environment(
        self, *, gpus: tuple[int, ...], extra: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """What a stage sets for its children."""
        return stage_environment(threads=self.threads, gpus=gpus, extra=extra)

    def nccl(
        self, use: Use, *, explicit: Mapping[str, str], gpus: tuple[int, ...]
    ) -> dict[str, str]:
        """NCCL_* variables of a stage's processes: the host's, then what its settings say.

        NcclError when run.nccl cannot be used.
        """
        path = self.settings.run.nccl
        return environment_for(path, use, explicit=explicit, gpus=len(gpus))

    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return load_tokenizer(self.target_folder, remote_code=self.settings.target.remote_code)

    def end_of_turn_ids(self, tokenizer: Any) -> frozenset[int]:
        """Ids that end an assistant turn. StageError when a configured token is unknown."""
        ids = set(self.target_facts().eos_token_ids)
        vocabulary = tokenizer.get_vocab()
        for token in self.settings.target.end_of_turn:
            if token not in vocabulary:
                raise StageError(
                    f"target.end_of_turn names {token!r}, which is not in the vocabulary of "
                    f"{self.target_folder}",
                    wanted="a token of the target's tokenizer",
                    next_step="correct target.end_of_turn",
                )
            ids.add(int(vocabulary[token]))
        if beyond := self.beyond_embedding(sorted(ids)):
            raise StageError(
                f"{self.target_folder}: a turn ends with {beyond.detail}",
                wanted="an id of the target's embedding",
                next_step="correct target.end_of_turn, or fetch the model's folder again, whole",
            )
        return frozenset(ids)


def device_of(gpus: tuple[int, ...]) -> Literal["cpu", "cuda"]:
    """`cuda` when a stage has GPUs (it sees only its own), else `cpu`."""
    return "cuda" if gpus else "cpu"
