"""adopt: states that another system dumped become the output of extract, each proven to be right.

The dump is listed, every request judged by some of its rows (the survey), and those that fit a
sample are read whole, once, into shards. What is left out is counted by reason.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipeline.adoption.book import Book
from pipeline.adoption.dump import FILES, Dump, Request
from pipeline.adoption.judge import FITS, Judge, Verdict
from pipeline.adoption.likeness import log_probabilities
from pipeline.adoption.norm import read_norm
from pipeline.adoption.shards import NO_DUMP, Source, sources_name, write_shards
from pipeline.adoption.survey import Journal, claims, pool_of, survey
from pipeline.capture.drive import shard_name
from pipeline.slate.files import named, read_json, write_atomic
from pipeline.slate.log import SAY
from pipeline.slate.progress import Progress, in_mib
from pipeline.slate.stage import Outcome, Workspace
from pipeline.stages.errors import NotProven, StageError, TooFew
from pipeline.stages.extract import (
    ExtractStage,
    check_complete,
    digests_of,
    facts_of,
    spread,
)
from pipeline.stages.follow import ADOPTED
from pipeline.stages.run import Run
from pipeline.store.index import counts_of
from pipeline.store.layout import row_bytes, state_fields
from pipeline.store.reader import PreparedSamples, StateDataset
from pipeline.target.tensors import read_embedding, read_head

REQUESTS = "requests.jsonl"
_JOURNAL = "journal.jsonl"
_PROBES = 16
_MEASURED_ROWS = 64
_OTHER_RUN = "duplicate_other_bytes"


class AdoptStage(ExtractStage):
    """Makes the output of extract from a dump. sealed: what its seal says of the dump, if it does.

    A sealed output is compared by that, so that the dump need not be there any more.
    """

    def __init__(
        self, run: Run, *, dump: Path | None = None, sealed: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(run)
        self.dump_path = dump or run.settings.adopt.dump
        self._sealed = sealed

    @property
    def gpus(self) -> tuple[int, ...]:
        """None: nothing is computed by the target."""
        return ()

    @property
    def environment(self) -> Mapping[str, str]:
        """Of no child: there is none."""
        return self._run.environment(gpus=())

    @property
    def decides(self) -> Mapping[str, Any]:
        """Taps, the plan of shards, the target, and which dump."""
        names = {"taps", "shard_bytes"}
        return {
            "engine": ADOPTED,
            **self._settings.model_dump(mode="json", include=names),
            "dump": self._sealed or self._dump.identity(),
            "target": self._run.target_decides(),
        }

    @cached_property
    def _dump(self) -> Dump:
        if self.dump_path is None:
            raise StageError(
                "adopt.dump is not set",
                wanted="the folder of a dump",
                next_step="make adopt DUMP=/path SAMPLES=/path",
            )
        return Dump.scan(self.dump_path)

    @cached_property
    def _judge(self) -> Judge:
        target = self._run.target_folder
        return Judge(
            self._dump.root,
            Book(PreparedSamples.open(self._run.output("prepare"))),
            head=read_head(target),
            embedding=read_embedding(target),
            norm=read_norm(target, hidden_size=self._run.target_facts().hidden_size),
        )

    def check(self) -> int:
        """The target fits, dump and run do not overlap, and some requests that are tried fit."""
        root, folder = self._dump.root.resolve(), self._run.folder.resolve()
        if root.is_relative_to(folder) or folder.is_relative_to(root):
            raise StageError(
                f"the dump {root} and the run {folder} lie in one another",
                wanted="a dump apart from the run, which is wiped",
                next_step="move the dump, or set run.root to another folder",
            )
        self.check_target()
        requests = self._dump.requests
        step = max(1, len(requests) // _PROBES)
        with self._one_thread_each(), pool_of(self._run.threads) as pool:
            tried = list(pool.map(self._judge.judge, requests[::step]))
        if not any(verdict.outcome == FITS for verdict in tried):
            first = {verdict.outcome: verdict.detail for verdict in reversed(tried)}
            raise StageError(
                f"none of {len(tried)} requests of {root} that were tried fits a sample: "
                + "; ".join(f"{reason} ({detail})" for reason, detail in first.items()),
                wanted="states of this target for these samples",
                next_step="check DUMP, SAMPLES, PROFILE, target and extract.taps; docs/adopt.md "
                "says what each reason means",
            )
        samples = PreparedSamples.open(self._run.output("prepare"))
        fields = state_fields(self._run.target_facts().hidden_size, taps=len(self._settings.taps))
        total = sum(entry.length for entry in samples.entries) * row_bytes(fields)
        return int(min(total, self._dump.bytes) * 1.02) + (64 << 20)

    @contextmanager
    def _one_thread_each(self) -> Iterator[None]:
        """Threads of the pools are the parallelism; those of torch inside each would be in the way.

        It is the whole process's setting, so it is put back.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def run(self, workspace: Workspace) -> None:
        """Judges every request, then writes every shard that is not there and whole already."""
        dump = self._dump
        samples = PreparedSamples.open(self._run.output("prepare"))
        shards, finished = self._plan(samples, workspace)
        SAY.info(
            "adopt: %d requests, %d MiB in %s; %d samples%s",
            len(dump.requests),
            dump.bytes >> 20,
            dump.root,
            len(samples.entries),
            f"; {dump.others} other entries are left alone" if dump.others else "",
        )
        journal = Journal(workspace.output / _JOURNAL, about={"dump": dump.identity()})
        with (
            self._one_thread_each(),
            Progress("adopt: survey", total=len(dump.requests), unit="requests") as progress,
        ):
            verdicts = survey(
                self._judge,
                dump.requests,
                journal,
                threads=self._run.threads,
                advance=progress.advance,
            )
        fitting, left_out = claims(dump.requests, verdicts)
        by_id = {samples.entries[index].id: found for index, found in fitting.items()}
        self._list(workspace.output, {**dict.fromkeys(verdicts, (FITS, "", "")), **{
            name: (*why, "") for name, why in left_out.items()}})  # fmt: skip
        refused = Counter(reason for reason, _ in left_out.values())
        self._refuse_few(workspace, kept=len(by_id), read=len(samples.entries), refused=refused)
        source = Source(dump.root, by_id, verdicts, self._judge.norm)
        todo = [
            (number, members, shard_name(number))
            for number, members in enumerate(shards)
            if number not in finished
        ]
        wanted = sum(
            request.bytes
            for _, members, _ in todo
            for entry in members
            for request in by_id.get(entry.id, ())[:1]
        )
        with (
            self._one_thread_each(),
            Progress("adopt: shards", total=wanted >> 20, unit="MiB") as progress,
        ):
            write_shards(
                source,
                samples,
                todo,
                folder=workspace.output,
                threads=self._writers(by_id, verdicts),
                advance=in_mib(progress),
            )
        self._list(workspace.output, self._outcomes(workspace.output, by_id, left_out, len(shards)))
        self._write_facts(workspace.output, len(shards))

    def _writers(
        self, by_id: Mapping[str, Sequence[Request]], verdicts: Mapping[str, Verdict]
    ) -> int:
        """Shards written at once: one a thread, as far as the largest request's rows allow."""
        largest = max(
            sum(piece.bytes + piece.rows * piece.width * 2 for piece in verdicts[one.name].pieces)
            for requests in by_id.values()
            for one in requests
        )
        room = self._run.settings.adopt.memory_bytes
        return max(1, min(self._run.threads, room // largest))

    def _outcomes(
        self,
        output: Path,
        by_id: Mapping[str, Sequence[Request]],
        left_out: Mapping[str, tuple[str, str]],
        shards: int,
    ) -> dict[str, tuple[str, str, str]]:
        """(outcome, detail, sample) of every request, from what lies beside the shards."""
        found = {name: (reason, detail, "") for name, (reason, detail) in left_out.items()}
        sources = [read_json(output / sources_name(number)) for number in range(shards)]
        adopted: dict[str, str] = {k: v for one in sources for k, v in one["adopted"].items()}
        failed = {k: v for one in sources for k, v in one["failed"].items()}
        for sample, requests in by_id.items():
            for request in requests:
                if adopted.get(sample) == request.name:
                    found[request.name] = (ADOPTED, "", sample)
                elif request.name in failed:
                    found[request.name] = (*failed[request.name], sample)
                else:
                    detail = f"{adopted[sample]} was adopted for the same sample"
                    found[request.name] = (_OTHER_RUN, detail, sample)
        return found

    def _list(self, output: Path, outcomes: Mapping[str, tuple[str, str, str]]) -> None:
        """Writes what became of each request, one a line, in the dump's order."""
        lines = []
        for request in self._dump.requests:
            outcome, detail, sample = outcomes[request.name]
            line = {"request": request.name, "outcome": outcome, "detail": detail, "sample": sample}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        text = "".join(lines)
        write_atomic(output / REQUESTS, text.encode("utf-8", errors="backslashreplace"))

    def _refuse_few(
        self, workspace: Workspace, *, kept: int, read: int, refused: Mapping[str, int]
    ) -> None:
        """StageError when fewer samples have states than extract.least_kept_share asks for."""
        share = self._settings.least_kept_share
        if kept and kept >= share * read:
            return
        raise TooFew(
            f"states for {kept} of {read} samples; of {len(self._dump.requests)} requests are "
            f"left out: {dict(refused)}",
            wanted=f"at least extract.least_kept_share, {share:.0%}",
            next_step=f"{workspace.output / REQUESTS} names each request and why; with what there "
            "is: make adopt RESUME=1 SET=extract.least_kept_share=... and the same DUMP",
        )

    def outcome(self, workspace: Workspace) -> Outcome:
        """Found = adopted + refused, samples = adopted + missing, and what was measured."""
        samples = PreparedSamples.open(self._run.output("prepare"))
        dataset = StateDataset.open(workspace.output)
        check_complete(samples, dataset)
        listed = workspace.output / REQUESTS
        with named(listed), listed.open(encoding="utf-8") as file:
            outcomes = Counter(json.loads(line)["outcome"] for line in file)
        adopted, found = outcomes.pop(ADOPTED, 0), len(self._dump.requests)
        kept, read = len(dataset.entries), len(samples.entries)
        if adopted != kept or adopted + outcomes.total() != found:
            raise NotProven(
                f"{found} requests, {adopted} adopted, {outcomes.total()} left out; {kept} samples",
                wanted="found = adopted + left out, and a sample for each that is adopted",
                next_step="this is a fault of the stage: please report it",
            )
        self._refuse_few(workspace, kept=kept, read=read, refused=outcomes)
        skipped = Counter(reason for _, reason in dataset.skipped)
        SAY.info(
            "adopt: %d requests found, %d adopted, %d left out %s; %d samples have no states (%d "
            "of them no request); each request's outcome is in %s",
            found,
            adopted,
            outcomes.total(),
            dict(outcomes) or "",
            read - kept,
            skipped[NO_DUMP],
            workspace.output / REQUESTS,
        )
        return Outcome(
            counts={
                **counts_of(dataset.entries, dataset.skipped),
                "dump": {"found": found, "adopted": adopted, "refused": dict(outcomes)},
            },
            facts=facts_of(dataset),
            measured=self._measured(workspace.output, dataset),
            known_digests=digests_of(dataset),
            volatile=lambda name: name == _JOURNAL,
        )

    def _measured(self, output: Path, dataset: StateDataset) -> dict[str, Any]:
        """Scores of what was adopted, and how well its final states predict supervised tokens."""
        journal = Journal(output / _JOURNAL, about={"dump": self._dump.identity()})
        fits = [v for v in journal.read(self._dump.requests).values() if v.outcome == FITS]
        scores = {
            name: {
                "least": round(min(v.scores[name] for v in fits), 4),
                "median": round(float(torch.tensor([v.scores[name] for v in fits]).median()), 4),
            }
            for name in fits[0].scores
        }
        chosen = spread(dataset.entries, self._settings.logprob_samples)
        head, values = self._judge.head, []
        for entry in (entry for entry in dataset.entries if entry.id in chosen):
            states = dataset.read(entry)
            rows = states.supervised[1:].nonzero()[:_MEASURED_ROWS, 0]
            if len(rows):
                labels = states.input_ids[rows + 1].long()
                values.append(float(log_probabilities(states.final[rows], labels, head).mean()))
        return {
            "scores": scores,
            "supervised_log_probability_samples": len(values),
            "supervised_log_probability_nats": round(sum(values) / max(1, len(values)), 4),
            "files": list(FILES),
        }
