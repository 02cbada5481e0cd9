"""`adopt` in a container: the dump to read, the run to write, and nothing else."""

import json
from pathlib import Path

from pipeline.containers.lines import lines_of
from pipeline.slate.wipe import MARKER, marker_value
from pipeline.stages.follow import recorded_tokens, unfinished_dump
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
    lines = [*lines_of([found], folder=Path("/data/runs/kimi-k2.5"))]
    # Links in it are judged, not followed: what they lead to is not for the container.
    assert lines[lines.index(f"source {tmp_path / 'dump'}") - 1] == "mount alone"


def begin(output: Path, settings: dict[str, object]) -> None:
    output.mkdir()
    marker = marker_value(output.name, {"settings": settings})
    (output / MARKER).write_text(json.dumps(marker))


def test_what_was_begun_is_gone_on_with_without_naming_it_again(tmp_path: Path) -> None:
    prepare, extract = tmp_path / "prepare", tmp_path / "extract"
    assert (recorded_tokens(prepare, {}), unfinished_dump(extract)) == (None, None)
    begin(prepare, {"tokens": {"path": "/old/samples.jsonl"}})
    begin(extract, {"engine": "adopted", "dump": {"path": "/old/dump"}})
    tokens, dump = recorded_tokens(prepare, {}), unfinished_dump(extract)
    begun = ("prepare", "extract")
    for container in planned("train", "tiny", begun=begun, tokens=tokens, dump=dump):
        shown = {str(mount.source): mount.writable for mount in container.mounts}
        assert (shown["/old/samples.jsonl"], shown["/old/dump"]) == (False, False)
    (extract / "manifest.json").write_text("{}")
    assert unfinished_dump(extract) is None
