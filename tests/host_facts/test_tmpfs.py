from collections.abc import Callable

from pipeline.host.reader import HostReader, Missing, Reader, Room
from pipeline.host.tmpfs import mounted_at, read_tmpfs

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
tmpfs /mnt/hs tmpfs rw,nosuid,nodev,noexec,size=1024k,mode=700,uid=2000 0 0
tmpfs /mnt/with\\040blank tmpfs rw 0 0
"""


def test_what_is_mounted_exactly_there_counts(simulated: str) -> None:
    assert mounted_at(MOUNTS, "/mnt/hs") == "tmpfs"
    assert mounted_at(MOUNTS, "/mnt/with blank") == "tmpfs"
    assert mounted_at(MOUNTS, "/mnt/hs/below") is None
    assert mounted_at(MOUNTS, "/mnt") is None


def test_of_stacked_mounts_the_last_is_seen(simulated: str) -> None:
    assert mounted_at(MOUNTS + "/dev/sdb1 /mnt/hs xfs rw 0 0\n", "/mnt/hs") == "xfs"


def test_a_folder_without_a_mount_has_an_owner_and_no_kind(
    recorded: Callable[..., Reader],
) -> None:
    facts = read_tmpfs(recorded({"/proc/self/mounts": "", "/mnt/hs/x": ""}), "/mnt/hs")
    assert facts.kind is None
    assert not isinstance(facts.entry, Missing)


def test_the_live_size_of_a_real_tmpfs_is_told() -> None:
    facts = read_tmpfs(HostReader(), "/dev/shm")  # noqa: S108  every Linux has one
    assert facts.kind == "tmpfs"
    assert isinstance(facts.room, Room)
    assert facts.room.bytes % 4096 == 0
