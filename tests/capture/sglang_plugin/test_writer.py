import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.capture.sglang_plugin.request_state import CapturedRequest, Refused
from pipeline.capture.sglang_plugin.ring import Piece, StateCopier
from pipeline.capture.sglang_plugin.writer import Room, Writer, check_piece

H = 8
RID = "cs-n-s7-0"


def make_request(n: int, rid: str = RID) -> CapturedRequest:
    return CapturedRequest(rid, np.arange(100, 100 + n, dtype=np.int32), seen_at=0.0)


def make_states(n: int, *, channels: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, H, generator=generator).bfloat16() for _ in range(channels)]


class Desk:
    """A writer with its ring, and rows to write."""

    def __init__(self, folder: Path, *, quota: int = 1 << 20, timeout: float = 5.0) -> None:
        self.copier = StateCopier(1 << 16, device=torch.device("cpu"))
        self.writer = Writer(folder, quota_bytes=quota, threads=2, timeout_seconds=timeout)
        self.folder = folder

    def piece(self, request: CapturedRequest, states: list[torch.Tensor], a: int, b: int) -> Piece:
        ids = torch.tensor(request.ids.astype(np.int64))
        return self.copier.copy(states, ids, first_row=a, position=a, rows=b - a, timeout_seconds=5)

    def run(self, request: CapturedRequest, states: list[torch.Tensor]) -> Refused | None:
        file = self.writer.open(request, taps=len(states) - 1, width=H)
        if isinstance(file, Refused):
            return file
        self.writer.put(file, self.piece(request, states, 0, len(request.ids)))
        return self.writer.close(file)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name[0] != ".")

    def hidden(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if ".safetensors" in path.name]


@pytest.mark.parametrize("order", [[(0, 3), (3, 5), (5, 9)], [(5, 9), (0, 3), (3, 5)]])
def test_pieces_in_any_order_make_the_whole_file(
    tmp_path: Path, order: list[tuple[int, int]]
) -> None:
    desk, request, states = Desk(tmp_path), make_request(9), make_states(9)
    file = desk.writer.open(request, taps=3, width=H)
    assert not isinstance(file, Refused)
    for a, b in order:
        desk.writer.put(file, desk.piece(request, states, a, b))
    assert desk.writer.close(file) is None
    desk.writer.stop()
    found = load_file(tmp_path / f"{RID}.safetensors")
    assert found["input_ids"].dtype == torch.int32
    assert found["input_ids"].tolist() == list(range(100, 109))
    for name, state in zip(("tap_0", "tap_1", "tap_2", "final"), states, strict=True):
        assert torch.equal(found[name], state)
    assert desk.names() == [f"{RID}.safetensors"]


def test_a_file_is_not_visible_before_its_request_has_ended(tmp_path: Path) -> None:
    desk, request, states = Desk(tmp_path), make_request(4), make_states(4)
    file = desk.writer.open(request, taps=3, width=H)
    assert not isinstance(file, Refused)
    desk.writer.put(file, desk.piece(request, states, 0, 4))
    desk.writer.stop()
    assert desk.names() == []


def test_a_file_with_rows_missing_never_appears(tmp_path: Path) -> None:
    desk, request, states = Desk(tmp_path), make_request(4), make_states(4)
    file = desk.writer.open(request, taps=3, width=H)
    assert not isinstance(file, Refused)
    desk.writer.put(file, desk.piece(request, states, 0, 3))
    desk.writer.close(file)
    desk.writer.stop()
    assert desk.names() == []


def fault_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / f"{RID}.failed").read_text())
    return found


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("channel", "name"), [(1, "tap_1"), (3, "final")])
def test_a_value_that_is_not_finite_fails_the_request(
    tmp_path: Path, bad: float, channel: int, name: str
) -> None:
    desk, request, states = Desk(tmp_path), make_request(5), make_states(5)
    states[channel][3, 2] = bad
    refused = desk.run(request, states)
    desk.writer.stop()
    # Known at the receipt or after it, whichever the threads reached first.
    found = {"reason": refused.reason, "detail": refused.detail} if refused else fault_of(tmp_path)
    assert found == {"reason": "not_finite", "detail": f"{name} row 3 is not finite"}
    assert desk.hidden() == []


def test_the_greatest_finite_value_passes() -> None:
    copier, request, states = (
        StateCopier(1 << 16, device=torch.device("cpu")),
        make_request(2),
        make_states(2),
    )
    states[0][0, 0] = -torch.finfo(torch.bfloat16).max
    ids = torch.tensor(request.ids.astype(np.int64))
    piece = copier.copy(states, ids, first_row=0, position=0, rows=2, timeout_seconds=1)
    assert check_piece(piece, request.ids, scratch=np.empty(3, np.uint16)) is None


def test_another_token_id_in_the_forward_fails_the_request(tmp_path: Path) -> None:
    desk, request, states = Desk(tmp_path), make_request(5), make_states(5)
    file = desk.writer.open(request, taps=3, width=H)
    assert not isinstance(file, Refused)
    other = make_request(5)
    other.ids[4] = 7
    file.close()  # the receipt is out
    desk.writer.put(file, desk.piece(other, states, 0, 5))
    desk.writer.stop()
    assert fault_of(tmp_path) == {
        "reason": "other_ids",
        "detail": "row 4: the forward ran another token id",
    }
    assert desk.names() == [f"{RID}.failed"]


def test_a_request_larger_than_the_quota_is_refused_before_any_row(tmp_path: Path) -> None:
    desk = Desk(tmp_path, quota=100)
    refused = desk.run(make_request(4), make_states(4))
    assert refused is not None
    assert refused.reason == "io"
    assert "the staging quota is 100" in refused.detail
    desk.writer.stop()


def test_writers_wait_for_room_and_nothing_is_dropped(tmp_path: Path) -> None:
    desk = Desk(tmp_path, quota=3 * 6000, timeout=30)  # three files of about 5 KB
    most, seen = 0, []
    ended = threading.Event()

    def read_slowly() -> None:
        nonlocal most
        room = Room(tmp_path, quota_bytes=0)
        while not ended.is_set() or desk.names():
            most = max(most, room.waiting_bytes())
            for name in desk.names():
                seen.append(name)
                (tmp_path / name).unlink()
                time.sleep(0.005)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    for number in range(25):
        assert desk.run(make_request(12, f"cs-n-s{number}-0"), make_states(12)) is None
    desk.writer.stop()
    ended.set()
    reader.join()
    assert sorted(seen) == sorted(f"cs-n-s{number}-0.safetensors" for number in range(25))
    assert most <= 3 * 6000


def test_no_room_in_time_fails_the_request_by_name(tmp_path: Path) -> None:
    (tmp_path / "left.safetensors").write_bytes(bytes(9000))
    desk = Desk(tmp_path, quota=10_000, timeout=0.05)
    file = desk.writer.open(make_request(12), taps=3, width=H)
    assert not isinstance(file, Refused)
    file.close()
    desk.writer.put(file, desk.piece(make_request(12), make_states(12), 0, 12))
    desk.writer.stop()
    assert fault_of(tmp_path)["reason"] == "io"
    assert "no room for" in fault_of(tmp_path)["detail"]


def test_the_ring_is_given_back_whatever_happens_to_the_pieces(tmp_path: Path) -> None:
    desk, states = Desk(tmp_path, quota=6000, timeout=0.01), make_states(12)
    for number in range(20):
        desk.run(make_request(12, f"cs-n-s{number}-0"), states)
    desk.writer.stop()
    assert desk.copier._ring.taken_bytes == 0


def test_a_discarded_request_leaves_nothing_and_its_successor_is_whole(tmp_path: Path) -> None:
    desk, states = Desk(tmp_path), make_states(6)
    first = make_request(6)
    old = desk.writer.open(first, taps=3, width=H)
    assert not isinstance(old, Refused)
    desk.writer.put(old, desk.piece(first, states, 0, 2))
    old.discard(Refused("retracted", "prefilled again"))
    assert desk.run(make_request(6), states) is None
    desk.writer.stop()
    assert torch.equal(load_file(tmp_path / f"{RID}.safetensors")["tap_2"], states[2])
    assert desk.hidden() == [f"{RID}.safetensors"]


def test_two_processes_share_one_quota(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from pipeline.capture.sglang_plugin.writer import Room\n"
        "room = Room(Path(sys.argv[1]), quota_bytes=10_000)\n"
        "made = [room.create(Path(sys.argv[1]) / f'{sys.argv[2]}{k}.safetensors', 1000)"
        " for k in range(10)]\n"
        "print(sum(one is not None for one in made))\n"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), name], stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    made = [int(run.communicate()[0]) for run in runs]
    assert sum(made) == 10


def test_a_full_disk_fails_the_request_and_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from pipeline.capture.sglang_plugin.writer import Room\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "room = Room(Path(sys.argv[1]), quota_bytes=1 << 30)\n"
        "try:\n    room.create(Path(sys.argv[1]) / 'a.safetensors', 8192)\n"
        "except OSError as error:\n    print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "OSError\n"
    assert not list(tmp_path.glob("*.safetensors"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_the_counters_say_what_was_written(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run(make_request(5), make_states(5))
    desk.writer.stop()
    (file,) = tmp_path.glob(".counters-*.json")
    told = json.loads(file.read_text())
    assert (told["requests"], told["bytes"]) == (1, 5 * (4 * 2 * H + 4))
