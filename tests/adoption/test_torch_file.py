"""What is in a .pt file: read exactly, or refused with the reason; never run."""

import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.adoption.torch_file import Piece, Unfit, locate, read_blocks, read_whole

ROWS = torch.arange(40, dtype=torch.float32).view(10, 4).bfloat16()


def save(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)  # noqa: TID251  the old system's format
    return path


def located(path: Path) -> Piece:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return locate(descriptor, file=path.name)
    finally:
        os.close(descriptor)


def whole(path: Path) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_whole(descriptor, locate(descriptor, file=path.name))
    finally:
        os.close(descriptor)


def refusal(path: Path) -> str:
    with pytest.raises(Unfit) as caught:
        whole(path)
    return caught.value.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tensor_is_read_as_it_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    path = save(tmp_path / "a.pt", ROWS.to(dtype))
    assert torch.equal(whole(path), ROWS.to(dtype))


def test_blocks_are_the_rows_asked_for(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", ROWS)
    descriptor = os.open(path, os.O_RDONLY)
    rows = read_blocks(descriptor, locate(descriptor, file="a.pt"), [(1, 2), (7, 1)])
    os.close(descriptor)
    assert rows.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11], [28, 29, 30, 31]]


def test_a_slice_of_a_batch_is_read_from_its_larger_storage(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", ROWS[3:6])
    assert located(path).record_bytes == 80
    assert whole(path).tolist() == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 23]]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("wrap", [lambda b: b, lambda b: [ROWS, b], lambda b: {"x": ROWS, "y": b}])
def test_a_pickle_that_would_run_something_is_refused_and_not_run(
    tmp_path: Path, wrap: Any
) -> None:
    path = save(tmp_path / "a.pt", wrap(Bomb(tmp_path / "ran")))
    with zipfile.ZipFile(path, "a") as archive:  # the case without a storage would end earlier
        if not any("/data/" in name for name in archive.namelist()):
            archive.writestr("a/data/0", b"x")
    assert refusal(path) == "unsafe_pickle"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"states": ROWS}, "not_a_tensor"),
        ([ROWS, ROWS.clone()], "not_a_tensor"),
        (OrderedDict(a=ROWS), "not_a_tensor"),
        (torch.nn.Parameter(ROWS), "not_a_tensor"),
        (7, "not_a_tensor"),
        (ROWS[None], "shape"),
        (ROWS[0], "shape"),
        (ROWS.T, "shape"),
        (ROWS[:1].expand(10, 4), "shape"),
        (ROWS.to(torch.float64), "dtype"),
        (ROWS.to(torch.int32), "dtype"),
    ],
)
def test_anything_but_rows_of_floats_is_refused(tmp_path: Path, value: Any, reason: str) -> None:
    assert refusal(save(tmp_path / "a.pt", value)) == reason


def test_the_format_before_1_6_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", ROWS, _use_new_zipfile_serialization=False)
    assert refusal(path) == "old_format"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_a_cut_file_is_unreadable(tmp_path: Path, share: float) -> None:
    path = save(tmp_path / "a.pt", ROWS)
    os.truncate(path, int(path.stat().st_size * share))
    assert refusal(path) == "unreadable"


def test_one_flipped_bit_of_the_rows_is_found(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", ROWS)
    data = bytearray(path.read_bytes())
    data[located(path).start + 33] ^= 1
    path.write_bytes(data)
    assert refusal(path) == "damaged"


def test_a_compressed_archive_is_unreadable(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", ROWS)
    packed = tmp_path / "b.pt"
    with (
        zipfile.ZipFile(path) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert refusal(packed) == "unreadable"
