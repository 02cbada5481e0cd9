"""`adopt` in a container: the dump to read, the run to write, and nothing else."""

from pathlib import Path

from tests.containers.test_plan import planned


def test_adopt_needs_the_samples_and_gets_the_dump_to_read(tmp_path: Path) -> None:
    dump = f"adopt.dump={tmp_path / 'dump'}"
    *before, found = planned("adopt", "kimi-k2.5", dump, resume=True)
    assert [container.stage for container in before] == ["prepare"]
    assert found.stage == "adopt"
    assert "--resume" in found.command
    assert "--image-facts" in found.command
    assert found.gpus == ()
    mounts = {str(mount.source): mount.writable for mount in found.mounts}
    assert mounts[str(tmp_path / "dump")] is False
    assert [path for path, writable in mounts.items() if writable] == ["/data/runs"]
