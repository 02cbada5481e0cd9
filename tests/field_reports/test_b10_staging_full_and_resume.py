"""B10: a staging folder that is full, and resumes that make nothing again.

What a disk and a real file system do to it is in tests/faults (test_disks, test_places).
"""

import json
import queue
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.capture.contract import Answer, GroupDone, Receipt, Request
from pipeline.capture.drive import CapturePlan, capture_states
from pipeline.capture.errors import CaptureError
from pipeline.capture.plan import plan_shards
from pipeline.capture.staging import Staging
from pipeline.capture.stand_in import StandIn
from pipeline.settings.load import load_settings
from pipeline.slate.manifest import Manifest
from pipeline.slate.stage import Workspace, perform
from pipeline.slate.wipe import claim
from pipeline.stages.extract import ExtractStage
from pipeline.stages.prepare import PrepareStage
from pipeline.stages.run import Run
from pipeline.stages.target import TargetStage
from pipeline.store.layout import row_bytes, state_fields
from pipeline.store.reader import DatasetFacts, PreparedSamples, StateDataset
from pipeline.store.writer import SampleWriter, to_sample
from pipeline.target.tensors import read_head

SAMPLES = 50
HIDDEN, TAPS = 64, (1, 3, 4)


def run_in(root: Path, *overrides: str) -> Run:
    """The tiny profile below a folder, its shards of five samples each."""
    always = [f"run.root={root}", f"extract.staging={root / 'staging'}", "prepare.answers=file"]
    return Run(load_settings("tiny", overrides=[*always, *overrides]).settings)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose 50 samples are prepared, all of one length. Not to be changed."""
    folder = tmp_path_factory.mktemp("b10")
    with (folder / "talks.jsonl").open("w") as file:
        for number in range(SAMPLES):
            user = {"role": "user", "content": f"How much is {100 + number} and 1?"}
            answer = {"role": "assistant", "content": f"It is {101 + number}."}
            file.write(json.dumps({"messages": [user, answer]}) + "\n")
    run = run_in(folder / "runs", f"prepare.input={json.dumps(str(folder / 'talks.jsonl'))}")
    for stage in (TargetStage(run), PrepareStage(run)):
        perform(stage, root=run.folder, resume=False, threads=1)
    entries = PreparedSamples.open(run.output("prepare")).entries
    assert len(entries) == SAMPLES
    assert len({entry.length for entry in entries}) == 1
    return folder


class Counting:
    """The stand-in engine, counting what it is asked for; it dies after so many answers."""

    def __init__(self, engine: StandIn, *, dies_after: int | None = None) -> None:
        self._engine, self._dies_after = engine, dies_after
        self.asked: list[str] = []
        self._answered = 0

    def submit(self, group: Sequence[Request]) -> None:
        self.asked += [request.id for request in group]
        self._engine.submit(group)

    def answers(self) -> Iterator[Answer]:
        for answer in self._engine.answers():
            if isinstance(answer, Receipt):
                if self._answered == self._dies_after:
                    raise KeyboardInterrupt
                self._answered += 1
            yield answer


class Counted(ExtractStage):
    """The stage with the counting engine in place of its process."""

    def __init__(self, run: Run, *, dies_after: int | None = None) -> None:
        super().__init__(run)
        self._own, self._dies_after = run, dies_after
        self.asked: list[str] = []
        self.found: list[str] = []  # in the staging folder, before the engine began

    @contextmanager
    def _engine(
        self, samples: PreparedSamples, staging: Staging, workspace: Workspace
    ) -> Iterator[Any]:
        self.found = [path.name for path in staging.folder.iterdir()]
        head = read_head(self._own.target_folder)
        engine = StandIn(staging, hidden_size=HIDDEN, taps=TAPS, head=head)
        counting = Counting(engine, dies_after=self._dies_after)
        yield counting
        self.asked = counting.asked


def copied(prepared: Path, into: Path) -> Run:
    shutil.copytree(prepared / "runs", into / "runs")
    source = f"prepare.input={json.dumps(str(prepared / 'talks.jsonl'))}"
    length = PreparedSamples.open(into / "runs" / "tiny" / "prepare").entries[0].length
    five = 5 * length * row_bytes(state_fields(HIDDEN, taps=3))
    sizes = (f"extract.shard_bytes={five}", f"extract.batch_tokens={5 * length}")
    return run_in(into / "runs", source, *sizes, "extract.engine=stand_in")


def extract(stage: ExtractStage, run: Run, *, resume: bool) -> Manifest:
    return perform(stage, root=run.folder, resume=resume, threads=1)


def shards(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.output("extract").glob("states-*")}


def test_the_first_resume_asks_for_the_thirty_that_are_missing_and_the_second_for_none(
    prepared: Path, tmp_path: Path
) -> None:
    clean = copied(prepared, tmp_path / "clean")
    straight = extract(Counted(clean), clean, resume=False)
    run = copied(prepared, tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        extract(Counted(run, dies_after=20), run, resume=False)
    assert len(list(run.output("extract").glob("states-*.json"))) == 4  # of five samples each
    first = Counted(run)
    manifest = extract(first, run, resume=True)
    assert len(first.asked) == 30
    assert first.asked == [f"s-{number:07d}" for number in range(20, 50)]
    second = Counted(run)
    assert extract(second, run, resume=True).digest == manifest.digest == straight.digest
    assert second.asked == []
    assert shards(run) == shards(clean)


def test_a_resume_with_every_shard_whole_but_no_seal_asks_for_none(
    prepared: Path, tmp_path: Path
) -> None:
    run = copied(prepared, tmp_path)
    sealed = extract(Counted(run), run, resume=False)
    (run.output("extract") / "manifest.json").unlink()
    again = Counted(run)
    assert extract(again, run, resume=True).digest == sealed.digest
    assert again.asked == []


def test_a_shard_that_was_damaged_meanwhile_is_captured_again_by_a_resume(
    prepared: Path, tmp_path: Path
) -> None:
    run = copied(prepared, tmp_path)
    sealed = extract(Counted(run), run, resume=False)
    (run.output("extract") / "manifest.json").unlink()
    shard = run.output("extract") / "states-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    again = Counted(run)
    assert extract(again, run, resume=True).digest == sealed.digest
    assert again.asked == [f"s-{number:07d}" for number in range(15, 20)]


def test_files_of_a_dead_run_under_the_same_names_are_never_taken(
    prepared: Path, tmp_path: Path
) -> None:
    clean = copied(prepared, tmp_path / "clean")
    straight = extract(Counted(clean), clean, resume=False)
    run = copied(prepared, tmp_path / "orphans")
    staging = run.settings.staging_folder
    claim(staging, stage="staging", intent={})
    n = PreparedSamples.open(run.output("prepare")).entries[0].length
    for number in range(SAMPLES):
        rows = {f"tap_{k}": torch.full((n, HIDDEN), 7.0, dtype=torch.bfloat16) for k in range(3)}
        rows |= {"final": rows["tap_0"].clone(), "input_ids": torch.zeros(n, dtype=torch.int32)}
        save_file(rows, staging / f"{number:06d}.safetensors")
    (staging / ".000001.safetensors.partial").write_bytes(b"half")
    again = Counted(run)
    assert extract(again, run, resume=False).digest == straight.digest
    assert again.found == [".cleanslate.json"]
    assert not staging.exists()


class Eager:
    """The stand-in engine in a thread of its own: it writes ahead of the collector."""

    def __init__(self, engine: StandIn) -> None:
        self._engine = engine
        self._groups: queue.SimpleQueue[Sequence[Request] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (group := self._groups.get()) is not None:
            self._engine.submit(group)
            for answer in self._engine.answers():
                self._answers.put(answer)
                if isinstance(answer, GroupDone):
                    break

    def submit(self, group: Sequence[Request]) -> None:
        self._groups.put(group)

    def answers(self) -> Iterator[Answer]:
        while True:
            yield self._answers.get(timeout=60)


def test_fifty_samples_pass_through_a_quota_for_five_with_a_slow_collector(tmp_path: Path) -> None:
    for name in ("prepared", "states", "staging"):
        (tmp_path / name).mkdir()
    writer = SampleWriter(tmp_path / "prepared", shard_tokens=1000)
    for number in range(SAMPLES):
        ids = [number + 1, *range(200, 219)]
        writer.add(to_sample(f"s{number}", ids, supervised=[True] * 20, split="train"))
    writer.flush()
    samples = PreparedSamples.open(tmp_path / "prepared")
    sample_bytes = 20 * (4 * 6 * 2 + 4)  # four states of width 6 in bfloat16, and the id
    quota = 5 * (sample_bytes + 500)  # the header of a file is a few hundred bytes
    staging = Staging(tmp_path / "staging", quota_bytes=quota)
    seen: list[int] = []

    def slow(_rows: int) -> None:
        """Collects the next only when the engine has filled what it may."""
        before = -1
        while (now := staging.waiting_bytes()) != before:
            before = now
            threading.Event().wait(0.01)  # longer than the engine takes for a sample
        seen.append(now)

    size = row_bytes(state_fields(6, taps=3))
    plan = plan_shards(samples.entries, row_bytes=size, shard_bytes=25 * 20 * size)
    capture_states(
        Eager(StandIn(staging, hidden_size=6, taps=TAPS)),
        samples,
        plan=CapturePlan(plan, TAPS, 6, 500, frozenset(), lambda *_: 0.0, 30.0),
        finished=frozenset(),
        folder=tmp_path / "states",
        staging=staging,
        advance=slow,
        say=lambda line: pytest.fail(line),
    )
    DatasetFacts(6, TAPS, "f", len(plan)).write(tmp_path / "states")
    assert len(StateDataset.open(tmp_path / "states").entries) == SAMPLES
    assert max(seen) <= quota
    assert max(seen) > 3 * sample_bytes  # the engine did run ahead


def test_a_file_system_that_takes_less_than_the_quota_is_named_with_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    staging = Staging(tmp_path, quota_bytes=1 << 20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CaptureError) as caught:
            staging.write("a.safetensors", {"final": torch.ones(5000)}, timeout_seconds=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"{tmp_path}: 20000 bytes of a.safetensors cannot be written" in caught.value.found
    assert "File too large" in caught.value.found
    assert "RESUME=1" in caught.value.next_step
    assert list(tmp_path.iterdir()) == []
