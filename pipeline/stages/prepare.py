"""prepare: conversations become token ids, supervised tokens, splits and the draft vocabulary."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.conversations.answers import Answer, read_answers
from pipeline.conversations.normalise import Skip, normalise, prompt_messages, tools_of
from pipeline.conversations.pool import RenderSpec, render_records
from pipeline.conversations.prompts import read_prompts
from pipeline.conversations.read import Record, Unreadable, read_records
from pipeline.conversations.render import Renderer
from pipeline.conversations.server_answers import AnswerRequest
from pipeline.conversations.tokens import Tokens, read_tokens
from pipeline.draft.vocabulary import DraftVocabulary, build_vocabulary
from pipeline.slate.files import named, read_json, sha256_file, write_json
from pipeline.slate.log import SAY
from pipeline.slate.progress import Progress
from pipeline.slate.stage import Outcome, Workspace
from pipeline.stages.answering import answer_in_child, answer_on_server, answering_plan
from pipeline.stages.errors import NotProven, StageError, TooFew
from pipeline.stages.extract_server import known_interpreter
from pipeline.stages.follow import tokens_identity
from pipeline.stages.prepare_records import Tally, source_files
from pipeline.stages.run import Run
from pipeline.stages.server import plan_environment, plan_flags, server_decides
from pipeline.stages.splits import SplitWriter
from pipeline.stages.target import fetch
from pipeline.store.reader import PreparedSamples
from pipeline.store.writer import SampleWriter
from pipeline.target.facts import tokenizer_digest

VOCABULARY = "draft_vocabulary.safetensors"
_COUNTS = "counts.json"
_SKIPPED = "skipped.jsonl"
_REASONING_MARKERS = ("<think>", "</think>", "◁think▷", "◁/think▷")
_BYTES_PER_TOKEN = 5  # an int32 and a bool
_ROOM_BYTES = 256 << 20
_DUPLICATE = ("duplicate", "the same token ids as an earlier record")


class PrepareStage:
    """Reads, renders, tokenises once, marks, splits."""

    name = "prepare"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._settings = run.settings.prepare
        self._total = 0  # records, once they were looked at

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
            mode="json", exclude={"workers", "input", "tokens", "strict", "least_kept_share"}
        )
        if self._settings.tokens is not None:
            values["tokens"] = tokens_identity(
                self._settings.tokens, output=self._run.output("prepare")
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
        source = self._settings.tokens or self._settings.input
        assert source is not None
        return source_files(source)

    def check(self) -> int:
        """Sources there and readable, tokenizer and template usable, vocabulary size possible."""
        settings, facts = self._settings, self._run.target_facts()
        if settings.input is None and settings.prompts is None and settings.tokens is None:
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
        if settings.tokens is None:
            self._spec().renderer()
        if self._served:
            known_interpreter(self._run)
            plan_flags(self._run, answering_plan(self._run))
        if settings.prompts is not None:
            wheels = [fetch(self._run, wheel) for wheel in settings.prompts.wheels]
            read_prompts(wheels, settings.prompts.count, settings.prompts.seed)
            return _ROOM_BYTES
        self._survey()
        size = sum(path.stat().st_size for path in self._files())
        return size * _BYTES_PER_TOKEN + _ROOM_BYTES  # a token is at least a byte of text

    def _survey(self) -> None:
        """Reads everything once: what is lost, unreadable or of another shape costs no output.

        SourceError, or StageError when so few records are left that the stage must fail.
        """
        tally = Tally(self._settings.strict)
        with Progress("prepare: a first look", total=0, unit="records") as progress:
            for record in self._records():
                tally.read += 1
                progress.advance()
                try:
                    self._look_at(record)
                except Skip as skip:
                    tally.skip(record.place, skip.reason, skip.detail)
        self._total = tally.read
        kept = tally.read - tally.skipped.total()
        tally.refuse_few(kept, share=self._settings.least_kept_share)

    def _look_at(self, record: Record | Unreadable) -> None:
        """Raises Skip for a record that cannot be used, whatever the target and its template."""
        if isinstance(record, Unreadable):
            raise Skip("unreadable", record.reason)
        if self._settings.tokens is not None:
            self._tokens(record)
        elif self._settings.answers == "target":
            prompt_messages(record.value)
            tools_of(record.value)
        else:
            normalise(record.value)

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
        for path in [*workspace.output.glob("samples-*"), workspace.output / _SKIPPED]:
            path.unlink(missing_ok=True)  # of an earlier try; made again from the start
        facts, spec = self._run.target_facts(), self._spec()
        counts = torch.zeros(facts.vocabulary_size, dtype=torch.int64)
        writer = SplitWriter(
            SampleWriter(workspace.output, shard_tokens=self._settings.shard_tokens),
            held_out_share=self._settings.held_out_share,
            counts=counts,
        )
        # A name or a text that is no UTF-8 is written as JSON's own escapes.
        listed = workspace.output / _SKIPPED
        with named(listed), listed.open("w", encoding="utf-8", errors="backslashreplace") as file:
            tally = Tally(self._settings.strict, file)
            if self._settings.tokens is not None:
                self._from_tokens(writer, tally)
            elif self._settings.answers == "target":
                self._from_target(workspace, spec, writer, tally)
            else:
                self._from_file(spec, writer, tally)
        writer.finish()
        tally.refuse_few(writer.kept, share=self._settings.least_kept_share)
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
        found = [vocabulary[marker] for marker in _REASONING_MARKERS if marker in vocabulary]
        return [token for token in found if not self._run.beyond_embedding([token])]

    def _records(self) -> Iterator[Record | Unreadable]:
        for path in self._files():
            yield from read_records(path, max_record_bytes=self._settings.max_record_bytes)

    def _tokens(self, record: Record) -> Tokens:
        return read_tokens(
            record.value, vocabulary_size=self._run.known_ids, max_length=self._settings.max_length
        )

    def _from_tokens(self, writer: SplitWriter, tally: Tally) -> None:
        with Progress("prepare", total=self._total, unit="records") as progress:
            for record in self._records():
                tally.read += 1
                progress.advance()
                try:
                    if isinstance(record, Unreadable):
                        raise Skip("unreadable", record.reason)
                    tokens = self._tokens(record)
                except Skip as skip:
                    tally.skip(record.place, skip.reason, skip.detail)
                    continue
                # What came before the first answer decides the split, as for conversations.
                question = json.dumps(tokens.input_ids[: tokens.supervised.index(True)])
                if not writer.add(
                    question=question, input_ids=tokens.input_ids, supervised=tokens.supervised
                ):
                    tally.skip(record.place, *_DUPLICATE)

    def _from_file(self, spec: RenderSpec, writer: SplitWriter, tally: Tally) -> None:
        total = sum(path.stat().st_size for path in self._files())
        rendered = render_records(self._records(), spec, workers=self._settings.workers)
        with Progress("prepare", total=self._total, unit="records") as progress:
            SAY.info("prepare: %d MiB of conversations", total >> 20)
            for record, outcome in rendered:
                tally.read += 1
                progress.advance()
                if isinstance(outcome, Skip):
                    tally.skip(record.place, outcome.reason, outcome.detail)
                elif strange := self._run.beyond_embedding(outcome.input_ids):
                    tally.skip(record.place, strange.reason, strange.detail)
                elif not writer.add(
                    question=_question(record),
                    input_ids=outcome.input_ids,
                    supervised=outcome.supervised,
                ):
                    tally.skip(record.place, *_DUPLICATE)
                else:
                    tally.cut_to_length += outcome.cut_to_length

    def _from_target(
        self, workspace: Workspace, spec: RenderSpec, writer: SplitWriter, tally: Tally
    ) -> None:
        prompts = workspace.output / "prompts.jsonl"
        questions: dict[str, str] = {}
        with named(prompts), prompts.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for place, prompt in self._prompts(spec.renderer(), tally):
                questions[place] = json.dumps(prompt["messages"], sort_keys=True)
                file.write(json.dumps({"id": place, **prompt}, ensure_ascii=False) + "\n")
        tally.refuse_few(len(questions), share=self._settings.least_kept_share)
        answers = workspace.output / "answers.jsonl"
        request = AnswerRequest(
            folder=spec.folder,
            prompts=prompts,
            out=answers,
            max_new_tokens=self._settings.answering.max_new_tokens,
            dtype=self._settings.answering.compute_dtype,
            end_of_turn_ids=spec.end_of_turn_ids,
        )
        missing: Mapping[str, Skip] = {}
        if self._served:
            missing = answer_on_server(self._run, request, log=workspace.log)
        else:
            answer_in_child(self._run, request, log=workspace.log, environment=self.environment)
        kept, _ = read_answers(answers, end_of_turn_ids=spec.end_of_turn_ids)
        usable = {answer.id: answer for answer in kept}
        for place, question in questions.items():  # back in the order of the prompts
            answer = usable.get(place)
            if place in missing:
                tally.skip(place, missing[place].reason, missing[place].detail)
            elif answer is None:
                tally.skip(place, "empty_answer", "the target ended its turn at once")
            else:
                self._add_answer(answer, place, question, writer, tally)

    def _add_answer(
        self, answer: Answer, place: str, question: str, writer: SplitWriter, tally: Tally
    ) -> None:
        limit = self._settings.max_length
        n = len(answer.input_ids)
        if n > limit and self._settings.too_long == "skip":
            tally.skip(place, "too_long", f"{n} tokens with the answer, max_length {limit}")
        elif not writer.add(
            question=question,
            input_ids=answer.input_ids[:limit],
            supervised=answer.supervised[:limit],
        ):
            tally.skip(place, *_DUPLICATE)
        else:
            tally.cut_to_length += n > limit
            tally.cut_answers += answer.finish_reason == "length"

    def _prompts(self, renderer: Renderer, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, messages and tools to answer); what cannot be asked is skipped."""
        positions = self._run.target_facts().max_position_embeddings
        most = min(
            positions - self._settings.answering.max_new_tokens, self._settings.max_length - 1
        )
        for place, prompt in self._asked(tally):
            try:
                if isinstance(prompt, Skip):
                    raise prompt
                ids = renderer.prompt_ids(prompt["messages"], prompt.get("tools"))
                if strange := self._run.beyond_embedding(ids):
                    raise strange
                if len(ids) > most:
                    raise Skip("too_long", f"{len(ids)} tokens before the answer, at most {most}")
            except Skip as skip:
                tally.skip(place, skip.reason, skip.detail)
            else:
                yield place, prompt

    def _asked(self, tally: Tally) -> Iterator[tuple[str, dict[str, Any] | Skip]]:
        """(place, messages and tools), from the wheels or from the user's conversations."""
        if self._settings.prompts is not None:
            source = self._settings.prompts
            wheels = [fetch(self._run, wheel) for wheel in source.wheels]
            for number, text in enumerate(read_prompts(wheels, source.count, source.seed)):
                tally.read += 1
                yield f"prompt {number}", {"messages": [{"role": "user", "content": text}]}
            return
        for record in self._records():
            tally.read += 1
            try:
                self._look_at(record)
            except Skip as skip:
                yield record.place, skip
                continue
            assert isinstance(record, Record)
            prompt = {"messages": prompt_messages(record.value)}
            tools = tools_of(record.value)
            yield record.place, prompt | ({"tools": tools} if tools else {})

    def verify(self, workspace: Workspace) -> Outcome:
        """Counts add up; both splits are there; every sample has a supervised token."""
        counts = read_json(workspace.output / _COUNTS)
        samples = PreparedSamples.open(workspace.output)
        lost = sum(counts["skipped"].values())
        listed = workspace.output / _SKIPPED
        with named(listed), listed.open("rb") as file:
            lines = sum(1 for _ in file)
        if counts["read"] != counts["kept"] + lost or lost != lines:
            raise NotProven(
                f"{counts['read']} records read, {counts['kept']} kept, {lost} skipped, "
                f"{lines} listed as skipped",
                wanted="read = kept + skipped",
                next_step="this is a fault of the stage: please report it",
            )
        if counts["kept"] != len(samples.entries):
            raise NotProven(
                f"{len(samples.entries)} samples on disk, {counts['kept']} kept",
                wanted="as many",
                next_step="this is a fault of the stage: please report it",
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
                raise TooFew(
                    f"no sample in the split {split} ({counts['kept']} samples in all)",
                    wanted="at least one conversation to train on and one held out",
                    next_step="make prepare INPUT=... with two different first questions at least",
                )
        if unsupervised := [entry.id for entry in samples.entries if not entry.supervised]:
            raise NotProven(
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
