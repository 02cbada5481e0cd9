"""Every reader of a file that a user, a disk or a server may have spoilt, called as stages call it.

Each takes the path of the spoilt file, which lies in a copy of the folder it belongs to.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeline.adoption.book import Book
from pipeline.adoption.dump import FILES, Dump, opened
from pipeline.adoption.judge import Judge
from pipeline.adoption.survey import Journal, claims
from pipeline.adoption.torch_file import Unfit, locate, read_blocks, read_whole
from pipeline.capture.collector import Wrong, collect
from pipeline.capture.contract import Receipt, Refusal, Request, ids_digest
from pipeline.capture.sglang_generate import Limits, Prompt, read_answer
from pipeline.capture.sglang_reply import BadReply, read_reply
from pipeline.capture.staging import Staging
from pipeline.containers.images import BuiltImages
from pipeline.conversations.answering import read_prompt_file
from pipeline.conversations.answers import read_answers, take_back
from pipeline.conversations.normalise import Conversation, Skip, normalise
from pipeline.conversations.read import Record, read_records
from pipeline.conversations.render import Renderer
from pipeline.conversations.tokens import read_tokens
from pipeline.draft.export import load_exported
from pipeline.draft.vocabulary import DraftVocabulary
from pipeline.host.wanted import read_wanted
from pipeline.nccl.profile import environment_for
from pipeline.report.metrics import read_training
from pipeline.report.series import accuracy_curve, loss_curve, smooth
from pipeline.settings.load import flatten, load_settings
from pipeline.settings.strict_json import parse_json
from pipeline.slate.files import read_json
from pipeline.slate.manifest import Manifest, changed_files
from pipeline.slate.wipe import owned_directories, read_marker
from pipeline.store.check import check_shard, check_states
from pipeline.store.index import Sample, ShardIndex
from pipeline.store.layout import SAMPLE_FIELDS
from pipeline.store.reader import PreparedSamples, StateDataset
from pipeline.target.facts import fingerprint, read_facts
from pipeline.target.gguf import convert_gguf
from pipeline.target.gguf_check import check_weights
from pipeline.target.load import load_target
from pipeline.target.tensors import read_embedding, read_head
from pipeline.target.tokenizer import load_tokenizer
from pipeline.training.checkpoint import newest_complete, read_checkpoint
from pipeline.training.metrics import MetricsLog
from tests.hostile.host import host

IDS = torch.arange(5, dtype=torch.int32)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
ABOUT = {"dump": "d"}  # of the journal


def prepared(path: Path) -> None:
    samples = PreparedSamples.open(path.parent)
    for entry in samples.entries:
        samples.read(entry)
    for index in path.parent.glob("samples-*.json"):
        check_shard(path.parent, ShardIndex.read(index), fields=SAMPLE_FIELDS)


def states(path: Path) -> None:
    dataset = StateDataset.open(path.parent)
    rows = dataset.row_files(direct=False)
    for entry in dataset.entries:
        dataset.read(entry)
        place = rows.rows(entry, "final", 0, entry.length)
        rows.read(place, memoryview(bytearray(place.size)))
    sum(check_states(path.parent, threads=1))


def manifest(path: Path) -> None:
    found = Manifest.read(path.parent)
    json.dumps([found.digest, found.intent])
    changed_files(path.parent, found, threads=1, advance=lambda _: None)


def marker(path: Path) -> None:
    read_marker(path.parent)
    owned_directories(path.parent)


def checkpoint(path: Path) -> None:
    newest_complete(path.parent.parent)
    found = read_checkpoint(path.parent)
    found.model()
    found.optimizer()
    found.refuse_other(data=found.data, settings=found.settings)


def profile(path: Path) -> None:
    loaded = load_settings(str(path))
    for _, value, _ in flatten(loaded.settings):
        str(value)


def override(path: Path) -> None:
    load_settings("tiny", overrides=[path.read_bytes().decode(errors="replace")])


def conversations(path: Path) -> None:
    for record in read_records(path):
        if isinstance(record, Record):
            with _skipping():
                normalise(record.value)


def target(path: Path) -> None:
    folder = path.parent
    read_facts(folder)
    fingerprint(folder)
    read_embedding(folder)
    read_head(folder)


def target_model(path: Path) -> None:
    load_target(path.parent, dtype=torch.float32, device="cpu")


def _renderer(folder: Path) -> Renderer:
    tokenizer = load_tokenizer(folder, remote_code=False)
    ends = frozenset({3})
    return Renderer(tokenizer, end_of_turn_ids=ends, max_length=64, too_long="cut")


def tokenizer(path: Path) -> None:
    renderer = _renderer(path.parent)
    with _skipping():
        renderer.sample(Conversation(tuple(TALK), None, cut=False))


def template(path: Path) -> None:
    """The same, for a template whose outcome counts: a Skip is shown."""
    _renderer(path.parent).sample(Conversation(tuple(TALK), None, cut=False))


def gguf_file(path: Path) -> None:
    folder = path.parent / "out"
    convert_gguf(path, folder)
    check_weights(path, folder)


def nccl(path: Path) -> None:
    for use in ("extraction", "training"):
        environment_for(path, use, explicit={}, gpus=2)  # type: ignore[arg-type]


def images(path: Path) -> None:
    built = BuiltImages.read(path)
    for kind in built.images:
        built.provenance(kind)


def reply(path: Path) -> None:
    try:
        value = parse_json(path.read_bytes(), infinite=True)
    except ValueError:  # a transport fault (`SglangEngine._post`)
        return
    if isinstance(value, dict):
        with contextlib.suppress(BadReply):
            read_reply(Request("s-1", IDS, logprobs=True), value, rid="r-1")


def answer(path: Path) -> None:
    limits = Limits(4, frozenset({3}), 1, 1.0)
    try:
        value = parse_json(path.read_bytes(), infinite=True)
        kind = value["meta_info"]["finish_reason"]["type"]
        if kind == "abort":
            return
        read_answer(Prompt("p", (1, 2)), value, limits=limits, tries=1)
    except (
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
    ):  # a trouble, tried again (`_Client.ask`)
        pass


def staging(path: Path) -> None:
    sample = Sample("s-1", IDS, torch.ones(5, dtype=torch.bool), "train")
    receipt = Receipt("s-1", 5, ((0, 5),), ids_digest(IDS), "bfloat16", (0, 1, 2), path.name)
    found = collect(
        receipt, sample, staging=Staging(path.parent, quota_bytes=1 << 20), taps=(0, 1, 2),
        hidden_size=4, timeout_seconds=0.02,
    )  # fmt: skip
    assert isinstance(found, dict | Wrong | Refusal)


def answers(path: Path) -> None:
    read_answers(path, end_of_turn_ids=frozenset({3}))
    take_back(path, [["a"], ["b"]])


def dump(path: Path) -> None:
    """Judged, and each file read whole: what is Unfit is counted by its reason."""
    root = path.parent.parent
    samples = PreparedSamples.open(root.parent / "prepared")
    rows = torch.ones(8, 4)
    judge = Judge(root, Book(samples), head=rows, embedding=rows, norm=torch.ones(4))
    for request in Dump.scan(root).requests:
        assert judge.judge(request).detail
        with opened(root, request, FILES) as files:
            for name, descriptor in files.items():
                with contextlib.suppress(Unfit):
                    piece = locate(descriptor, file=name)
                    read_blocks(descriptor, piece, [(0, 1), (piece.rows - 1, 1)])
                    read_whole(descriptor, piece)


def journal(path: Path) -> None:
    requests = Dump.scan(path.parent / "dump").requests
    verdicts = Journal(path, about=ABOUT).read(requests)
    fitting, left_out = claims([one for one in requests if one.name in verdicts], verdicts)
    for sample, one in fitting.items():
        assert sample == 1, "decided otherwise"
        sum(piece.bytes for request in one for piece in verdicts[request.name].pieces)
    json.dumps(left_out)


def samples(path: Path) -> None:
    for record in read_records(path):
        if isinstance(record, Record):
            with _skipping():
                read_tokens(record.value, vocabulary_size=320, max_length=64)


def metrics(path: Path) -> None:
    found = read_training(path)
    smooth(loss_curve(found.steps * 60))
    smooth(accuracy_curve(found.steps * 60, 0))
    json.dumps([asdict(point) for point in found.held_out], allow_nan=False)


def metrics_resumed(path: Path) -> None:
    log = MetricsLog(path.parent, resumed_at=1)
    assert log.kept_steps <= 1
    log.close()


@contextmanager
def _skipping() -> Iterator[None]:
    with contextlib.suppress(Skip):
        yield


READERS: dict[str, Callable[[Path], Any]] = {
    "json": read_json,
    "shard_index": ShardIndex.read,
    "prepared": prepared,
    "states": states,
    "manifest": manifest,
    "marker": marker,
    "checkpoint": checkpoint,
    "profile": profile,
    "override": override,
    "ready_host": read_wanted,
    "conversations": conversations,
    "target": target,
    "target_model": target_model,
    "tokenizer": tokenizer,
    "template": template,
    "gguf": gguf_file,
    "nccl": nccl,
    "images": images,
    "reply": reply,
    "answer": answer,
    "staging": staging,
    "answers": answers,
    "dump": dump,
    "journal": journal,
    "samples": samples,
    "metrics": metrics,
    "metrics_resumed": metrics_resumed,
    "host": host,
    "prompts": read_prompt_file,
    "drafter": lambda path: load_exported(path.parent),
    "vocabulary": DraftVocabulary.load,
}
