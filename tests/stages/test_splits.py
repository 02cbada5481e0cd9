from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.stages.splits import SplitWriter
from pipeline.store.reader import PreparedSamples
from pipeline.store.writer import SampleWriter


def write(
    folder: Path, questions: list[str], *, share: float
) -> tuple[PreparedSamples, SplitWriter, torch.Tensor]:
    counts = torch.zeros(5000, dtype=torch.int64)
    writer = SplitWriter(
        SampleWriter(folder, shard_tokens=100), held_out_share=share, counts=counts
    )
    for number, question in enumerate(questions):
        ids = [1, 2, 1000 + number]
        assert writer.add(question=question, input_ids=ids, supervised=[False, False, True])
    writer.finish()
    return PreparedSamples.open(folder), writer, counts


def test_there_is_a_held_out_sample_however_small_the_share(tmp_path: Path) -> None:
    samples, *_ = write(tmp_path, ["a", "b", "c"], share=1e-12)
    splits = [entry.split for entry in samples.entries]
    assert splits.count("held_out") == 1
    assert splits.count("train") == 2


def test_equal_questions_are_on_one_side(tmp_path: Path) -> None:
    samples, *_ = write(tmp_path, ["a", "b", "a", "b", "a", "b"], share=1e-12)
    splits = [entry.split for entry in samples.entries]
    assert splits[0::2] == [splits[0]] * 3
    assert splits[1::2] == [splits[1]] * 3
    assert {splits[0], splits[1]} == {"train", "held_out"}


def test_a_single_question_is_not_held_out(tmp_path: Path) -> None:
    samples, *_ = write(tmp_path, ["a", "a"], share=1e-12)
    assert {entry.split for entry in samples.entries} == {"train"}


def test_the_share_is_about_what_was_asked_for(tmp_path: Path) -> None:
    samples, *_ = write(tmp_path, [str(number) for number in range(2000)], share=0.1)
    held_out = sum(entry.split == "held_out" for entry in samples.entries)
    assert held_out == pytest.approx(200, abs=50)


def test_only_supervised_tokens_of_training_samples_are_counted(tmp_path: Path) -> None:
    samples, _, counts = write(tmp_path, ["a", "b", "c"], share=1e-12)
    wanted = {
        1000 + number for number, entry in enumerate(samples.entries) if entry.split == "train"
    }
    assert set(counts.nonzero().flatten().tolist()) == wanted


def test_the_same_ids_again_are_told_and_left_out(tmp_path: Path) -> None:
    counts = torch.zeros(50, dtype=torch.int64)
    writer = SplitWriter(SampleWriter(tmp_path, shard_tokens=9), held_out_share=0.5, counts=counts)
    taken = [
        writer.add(question=str(ids), input_ids=ids, supervised=[False, True])
        for ids in ([1, 2], [1, 2], [1, 3])
    ]
    writer.finish()
    assert taken == [True, False, True]
    assert writer.kept == 2


@settings(max_examples=25)
@given(questions=st.lists(st.text(max_size=3), min_size=1, max_size=40), share=st.floats(0.01, 0.9))
def test_a_sample_has_the_same_split_whatever_else_is_in_the_file(
    questions: list[str], share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    samples, *_ = write(tmp_path_factory.mktemp("one"), questions, share=share)
    by_question: dict[str, str] = {}
    for question, entry in zip(questions, samples.entries, strict=True):
        assert by_question.setdefault(question, entry.split) == entry.split
