"""prepare: conversations become token ids, supervised tokens, splits and the draft vocabulary."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.conversations.answers import read_answers
from pipeline.conversations.normalise import Skip, prompt_messages
from pipeline.conversations.pool import RenderSpec, render_records
from pipeline.conversations.prompts import read_prompts
from pipeline.conversations.read import KINDS, Record, Unreadable, read_records
from pipeline.conversations.server_answers import AnswerRequest
from pipeline.draft.vocabulary import DraftVocabulary, build_vocabulary
from pipeline.slate.files import read_json, sha256_file, write_json
from pipeline.slate.log import SAY
from pipeline.slate.progress import Progress
from pipeline.slate.stage import Outcome, Workspace
from pipeline.stages.answering import answer_in_child, answer_on_server, answering_plan
from pipeline.stages.errors import StageError
from pipeline.stages.extract_server import known_interpreter
from pipeline.stages.run import Run
from pipeline.stages.server import plan_environment, plan_flags, server_decides
from pipeline.stages.splits import SplitWriter
from pipeline.stages.target import fetch
from pipeline.store.reader import PreparedSamples
from pipeline.store.writer import SampleWriter
from pipeline.target.facts import tokenizer_digest

VOCABULARY = "draft_vocabulary.safetensors"
_COUNTS = "counts.json"
_REASONING_MARKERS = ("<think>", "</think>", "◁think▷", "◁/think▷")
_BYTES_PER_TOKEN = 5  # an int32 and a bool
_ROOM_BYTES = 256 << 20


@dataclass
class _Tally:
    """Counts of one pass over the records, and where the skipped ones are written."""

    read: int = 0
    cut_to_length: int = 0
    cut_answers: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


class PrepareStage:
    """Reads, renders, tokenises once, marks, splits."""

    name = "prepare"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._settings = run.settings.prepare

    @property
    def _served(self) -> bool:
        """Whether answers are written by the SGLang server."""
        return self._settings.answers == "target" and self._settings.answering.engine == "sglang"

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPUs of the server that writes answers."""
        return self._settings.answering.gpus if self._served else ()

    @property
    def inputs(self) -> Mapping[str, Path]:
        """The target, when it is made here."""
        return self._run.target_inputs()

    @property
    def decides(self) -> Mapping[str, Any]:
        """All settings but the number of workers; input files by digest."""
        values = self._settings.model_dump(
            mode="json", exclude={"workers", "input", "strict", "least_kept_share"}
        )
        # What decides the last bits: the batch of the transformers engine, the server's flags.
        own = {"gpus", "batch_size" if self._served else "engine"}
        answering = {key: v for key, v in values["answering"].items() if key not in own}
        if self._served:
            answering["server"] = server_decides(self._run)
        files = self._files() if self._settings.input else []
        return {
            **values,
            "answering": answering,
            "input": {path.name: sha256_file(path) for path in files},
            "target": self._run.target_decides(),
            "end_of_turn": list(self._run.settings.target.end_of_turn),
            "vocabulary_size": self._run.settings.draft.vocabulary_size,
        }

    @property
    def environment(self) -> Mapping[str, str]:
        """Of the process, or the server, that writes answers."""
        if self._served:
            return plan_environment(self._run, answering_plan(self._run))
        return self._run.environment(gpus=self.gpus)

    def _files(self) -> list[Path]:
        source = self._settings.input
        assert source is not None
        if source.is_dir():
            files = sorted(path for path in source.iterdir() if path.name.endswith(KINDS))
            if not files:
                raise StageError(
                    f"prepare.input {source} holds no conversation file",
                    wanted=f"files that end in {', '.join(KINDS)}",
                    next_step="correct prepare.input",
                )
            return files
        if not source.is_file():
            raise StageError(
                f"prepare.input {source} does not exist",
                wanted="a file or a folder of conversations",
                next_step="correct the path: make prepare INPUT=...",
            )
        return [source]

    def check(self) -> int:
        """Sources there and readable, tokenizer and template usable, vocabulary size possible."""
        settings, facts = self._settings, self._run.target_facts()
        if settings.input is None and settings.prompts is None:
            raise StageError(
                "neither prepare.input nor prepare.prompts is set",
                wanted="conversations to prepare",
                next_step="make prepare INPUT=conversations.jsonl",
            )
        if settings.max_length > facts.max_position_embeddings:
            raise StageError(
                f"prepare.max_length is {settings.max_length}",
                wanted=f"at most the target's {facts.max_position_embeddings} positions",
                next_step="lower prepare.max_length",
            )
        if self._run.settings.draft.vocabulary_size > facts.vocabulary_size:
            raise StageError(
                f"draft.vocabulary_size is {self._run.settings.draft.vocabulary_size}",
                wanted=f"at most the target's {facts.vocabulary_size}",
                next_step="lower draft.vocabulary_size",
            )
        self._spec().renderer()
        if self._served:
            known_interpreter(self._run)
            plan_flags(self._run, answering_plan(self._run))
        if settings.prompts is not None:
            wheels = [fetch(self._run, wheel) for wheel in settings.prompts.wheels]
            read_prompts(wheels, settings.prompts.count, settings.prompts.seed)
            return _ROOM_BYTES
        size = 0
        for path in self._files():
            next(iter(read_records(path)), None)  # opens it: a fault of the file comes now
            size += path.stat().st_size
        return size * _BYTES_PER_TOKEN + _ROOM_BYTES  # a token is at least a byte of text

    def _spec(self) -> RenderSpec:
        return RenderSpec(
            folder=self._run.target_folder,
            remote_code=self._run.settings.target.remote_code,
            end_of_turn_ids=self._run.end_of_turn_ids(self._run.tokenizer()),
            max_length=self._settings.max_length,
            too_long=self._settings.too_long,
        )

    def run(self, workspace: Workspace) -> None:
        """Writes samples, the skip list, counts and the draft vocabulary."""
        for path in [*workspace.output.glob("samples-*"), workspace.output / "skipped.jsonl"]:
            path.unlink(missing_ok=True)  # of an earlier try; made again from the start
        facts, spec = self._run.target_facts(), self._spec()
        tally = _Tally()
        counts = torch.zeros(facts.vocabulary_size, dtype=torch.int64)
        writer = SplitWriter(
            SampleWriter(workspace.output, shard_tokens=self._settings.shard_tokens),
            held_out_share=self._settings.held_out_share,
            counts=counts,
        )
        with (workspace.output / "skipped.jsonl").open("w", encoding="utf-8") as skipped:

            def skip(place: str, reason: str, detail: str) -> None:
                tally.skipped[reason] += 1
                line = {"place": place, "reason": reason, "detail": detail}
                skipped.write(json.dumps(line, ensure_ascii=False) + "\n")
                if self._settings.strict:
                    raise StageError(
                        f"{place}: {reason}: {detail}",
                        wanted="a usable record (prepare.strict is on)",
                        next_step="correct the record, or set prepare.strict=false",
                    )

            if self._settings.answers == "target":
                self._from_target(workspace, spec, writer, tally, skip)
            else:
                self._from_file(spec, writer, tally, skip)
            for place in writer.finish():
                skip(place, "duplicate", "the same token ids as an earlier record")
        always = sorted({*spec.end_of_turn_ids, *self._markers()})
        vocabulary = build_vocabulary(
            counts, self._run.settings.draft.vocabulary_size, always_in=always
        )
        vocabulary.save(workspace.output / VOCABULARY)
        inside = int(counts[vocabulary.target_ids].sum())
        write_json(
            workspace.output / _COUNTS,
            {
                "read": tally.read,
                "kept": writer.kept,
                "skipped": dict(tally.skipped),
                "cut_to_length": tally.cut_to_length,
                "cut_answers": tally.cut_answers,
                "training_supervised_tokens": int(counts.sum()),
                "training_supervised_tokens_in_draft_vocabulary": inside,
            },
        )

    def _markers(self) -> list[int]:
        vocabulary = self._run.tokenizer().get_vocab()
        return [vocabulary[marker] for marker in _REASONING_MARKERS if marker in vocabulary]

    def _records(self) -> Iterator[Record | Unreadable]:
        for path in self._files():
            yield from read_records(path)

    def _from_file(self, spec: RenderSpec, writer: SplitWriter, tally: _Tally, skip: Any) -> None:
        total = sum(path.stat().st_size for path in self._files())
        rendered = render_records(self._records(), spec, workers=self._settings.workers)
        with Progress("prepare", total=0, unit="records") as progress:
            SAY.info("prepare: %d MiB of conversations", total >> 20)
            for record, outcome in rendered:
                tally.read += 1
                progress.advance()
                if isinstance(outcome, Skip):
                    skip(record.place, outcome.reason, outcome.detail)
                    continue
                tally.cut_to_length += outcome.cut_to_length
                writer.add(
                    record.place,
                    question=_question(record),
                    input_ids=outcome.input_ids,
                    supervised=outcome.supervised,
                )

    def _from_target(
        self,
        workspace: Workspace,
        spec: RenderSpec,
        writer: SplitWriter,
        tally: _Tally,
        skip: Any,
    ) -> None:
        prompts = workspace.output / "prompts.jsonl"
        questions: dict[str, str] = {}
        with prompts.open("w", encoding="utf-8") as file:
            for place, messages in self._prompts(skip, tally):
                questions[place] = json.dumps(messages, sort_keys=True)
                line = {"id": place, "messages": messages}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if not questions:
            raise _nothing_left(tally.read, tally.skipped)
        answers = workspace.output / "answers.jsonl"
        request = AnswerRequest(
            folder=spec.folder,
            prompts=prompts,
            out=answers,
            max_new_tokens=self._settings.answering.max_new_tokens,
            dtype=self._settings.answering.compute_dtype,
            end_of_turn_ids=spec.end_of_turn_ids,
        )
        if self._served:
            answer_on_server(self._run, request, log=workspace.log)
        else:
            answer_in_child(self._run, request, log=workspace.log, environment=self.environment)
        kept, counts = read_answers(answers, end_of_turn_ids=spec.end_of_turn_ids)
        tally.cut_answers = counts.length
        usable = {answer.id: answer for answer in kept}
        for place, question in questions.items():  # back in the order of the prompts
            answer = usable.get(place)
            if answer is None:
                skip(place, "empty_answer", "the target ended its turn at once")
            elif len(answer.input_ids) > self._settings.max_length:
                skip(place, "too_long", f"{len(answer.input_ids)} tokens with the answer")
            else:
                writer.add(
                    place,
                    question=question,
                    input_ids=answer.input_ids,
                    supervised=answer.supervised,
                )

    def _prompts(self, skip: Any, tally: _Tally) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """(place, messages to answer), from the wheels or from the user's conversations."""
        if self._settings.prompts is not None:
            source = self._settings.prompts
            wheels = [fetch(self._run, wheel) for wheel in source.wheels]
            for number, text in enumerate(read_prompts(wheels, source.count, source.seed)):
                tally.read += 1
                yield f"prompt {number}", [{"role": "user", "content": text}]
            return
        for record in self._records():
            tally.read += 1
            try:
                if isinstance(record, Unreadable):
                    raise Skip("unreadable", record.reason)
                yield record.place, prompt_messages(record.value)
            except Skip as reason:
                skip(record.place, reason.reason, reason.detail)

    def verify(self, workspace: Workspace) -> Outcome:
        """Counts add up; both splits are there; every sample has a supervised token."""
        counts = read_json(workspace.output / _COUNTS)
        if not counts["kept"]:
            raise _nothing_left(counts["read"], counts["skipped"])
        samples = PreparedSamples.open(workspace.output)
        lost = sum(counts["skipped"].values())
        lines = (workspace.output / "skipped.jsonl").read_text(encoding="utf-8").count("\n")
        if counts["read"] != counts["kept"] + lost or lost != lines:
            raise StageError(
                f"{counts['read']} records read, {counts['kept']} kept, {lost} skipped, "
                f"{lines} listed as skipped",
                wanted="read = kept + skipped",
                next_step="this is a fault of the stage: please report it",
            )
        if counts["kept"] != len(samples.entries):
            raise StageError(
                f"{len(samples.entries)} samples on disk, {counts['kept']} kept",
                wanted="as many",
                next_step="this is a fault of the stage: please report it",
            )
        if counts["kept"] < self._settings.least_kept_share * counts["read"]:
            raise StageError(
                f"{counts['kept']} of {counts['read']} records kept; skipped: {counts['skipped']}",
                wanted=f"at least prepare.least_kept_share, {self._settings.least_kept_share:.0%}",
                next_step=f"read {workspace.output / 'skipped.jsonl'}, or lower the share",
            )
        splits = {}
        for split in ("train", "held_out"):
            entries = [entry for entry in samples.entries if entry.split == split]
            splits[split] = {
                "samples": len(entries),
                "tokens": sum(entry.length for entry in entries),
                "supervised_tokens": sum(entry.supervised for entry in entries),
            }
            if not splits[split]["samples"]:
                raise StageError(
                    f"no sample in the split {split} ({counts['kept']} samples in all)",
                    wanted="at least one conversation to train on and one held out",
                    next_step="give at least two conversations with different first questions",
                )
        if unsupervised := [entry.id for entry in samples.entries if not entry.supervised]:
            raise StageError(
                f"sample {unsupervised[0]} has no supervised token",
                wanted="at least one in every sample",
                next_step="this is a fault of the stage: please report it",
            )
        vocabulary = DraftVocabulary.load(workspace.output / VOCABULARY)
        seen = max(counts["training_supervised_tokens"], 1)
        share = counts["training_supervised_tokens_in_draft_vocabulary"] / seen
        SAY.info(
            "prepare: %d read, %d kept, %d skipped %s; %d tokens, %d supervised; the draft "
            "vocabulary of %d covers %.1f %% of the supervised training tokens",
            counts["read"],
            counts["kept"],
            lost,
            counts["skipped"] or "",
            sum(split["tokens"] for split in splits.values()),
            sum(split["supervised_tokens"] for split in splits.values()),
            vocabulary.size,
            100 * share,
        )
        if self._settings.answers == "target":
            SAY.info(
                "prepare: %d answers reached the length limit and have no supervised end",
                counts["cut_answers"],
            )
        return Outcome(
            counts={**counts, "splits": splits},
            facts={
                "tokenizer_digest": tokenizer_digest(self._run.target_folder),
                "end_of_turn_ids": sorted(self._spec().end_of_turn_ids),
                "draft_vocabulary_size": vocabulary.size,
            },
        )


def _question(record: Record | Unreadable) -> str:
    """What decides the split of a kept record: the messages before its first answer."""
    assert isinstance(record, Record)
    return json.dumps(prompt_messages(record.value), sort_keys=True, default=str)


def _nothing_left(read: int, skipped: Mapping[str, int]) -> StageError:
    return StageError(
        f"0 of {read} records kept; skipped: {dict(skipped)}",
        wanted="at least one conversation with a supervised token",
        next_step="read the reasons in skipped.jsonl beside the samples; is the file of the shape "
        "that the README shows?",
    )
