import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from pipeline.draft.errors import VocabularyError
from pipeline.draft.vocabulary import DraftVocabulary, build_vocabulary


def kept(*targets: int, size: int) -> DraftVocabulary:
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[list(targets)] = True
    return DraftVocabulary(torch.tensor(targets) - torch.arange(len(targets)), t2d)


def test_offsets_of_a_known_vocabulary():
    counts = torch.tensor([0, 5, 0, 0, 4, 0, 0, 9, 0, 0])
    vocabulary = build_vocabulary(counts, 3)
    assert vocabulary.d2t.tolist() == [1, 3, 5]
    assert vocabulary.t2d.nonzero().flatten().tolist() == [1, 4, 7]
    assert vocabulary.d2t.dtype == torch.int64
    assert vocabulary.t2d.dtype == torch.bool


def test_full_vocabulary_is_the_identity():
    vocabulary = build_vocabulary(torch.tensor([3, 0, 7, 1]), 4)
    assert vocabulary.d2t.tolist() == [0, 0, 0, 0]
    assert vocabulary.t2d.all()


@pytest.mark.parametrize(
    ("counts", "size", "always_in", "targets"),
    [
        ([2, 2, 2, 2], 2, [], [0, 1]),  # ties by id
        ([0, 0, 0, 8], 3, [], [0, 1, 3]),  # filled with the lowest unused ids
        ([9, 8, 7, 0], 2, [3], [0, 3]),  # a marker that is never seen stays in
        ([0, 9, 8, 7], 3, [0, 0], [0, 1, 2]),
    ],
)
def test_tokens_are_chosen_by_the_rule(counts, size, always_in, targets):
    vocabulary = build_vocabulary(torch.tensor(counts), size, always_in=always_in)
    assert vocabulary.target_ids.tolist() == targets


@pytest.mark.parametrize(("size", "always_in"), [(0, []), (5, []), (2, [0, 1, 2]), (2, [4])])
def test_impossible_vocabularies_are_refused(size, always_in):
    with pytest.raises(VocabularyError):
        build_vocabulary(torch.ones(4, dtype=torch.int64), size, always_in=always_in)


@pytest.mark.parametrize(
    ("d2t", "t2d"),
    [
        (torch.tensor([1, 4, 7]), torch.arange(10) < 3),  # absolute ids in place of offsets
        (torch.tensor([1, 3, 5]), torch.arange(10) < 3),  # maps disagree
        (torch.tensor([1, 3, 5], dtype=torch.int32), torch.arange(10) < 3),
        (torch.tensor([1, 0, 0]), torch.arange(10) < 3),  # not rising
        (torch.tensor([0, 0, 8]), torch.arange(10) < 3),  # out of range
        (torch.tensor([-1, 0]), torch.arange(10) < 2),
        (torch.empty(0, dtype=torch.int64), torch.arange(10) < 0),
    ],
)
def test_broken_maps_are_refused(d2t, t2d):
    with pytest.raises(VocabularyError):
        DraftVocabulary(d2t, t2d)


@given(st.data())
def test_both_maps_undo_each_other(data):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=20))
    size = data.draw(st.integers(1, len(counts)))
    vocabulary = build_vocabulary(torch.tensor(counts), size)
    back = vocabulary.draft_ids()[vocabulary.target_ids]
    assert back.tolist() == list(range(size))
    assert int((vocabulary.draft_ids() >= 0).sum()) == size
    left_out = torch.tensor(counts)[~vocabulary.t2d]
    taken = torch.tensor(counts)[vocabulary.t2d]
    assert not left_out.numel() or int(taken.min()) >= int(left_out.max())


def test_a_saved_vocabulary_is_read_back(tmp_path):
    vocabulary = kept(1, 4, 7, size=10)
    vocabulary.save(tmp_path / "vocabulary.safetensors")
    assert DraftVocabulary.load(tmp_path / "vocabulary.safetensors").same_as(vocabulary)


def test_a_file_with_other_tensors_is_refused(tmp_path):
    path = tmp_path / "vocabulary.safetensors"
    save_file({**kept(1, size=3).tensors(), "more": torch.zeros(1)}, path)
    with pytest.raises(VocabularyError, match="more"):
        DraftVocabulary.load(path)


def test_a_cut_file_is_refused_by_name(tmp_path):
    path = tmp_path / "vocabulary.safetensors"
    kept(1, size=3).save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VocabularyError, match=r"vocabulary\.safetensors"):
        DraftVocabulary.load(path)
