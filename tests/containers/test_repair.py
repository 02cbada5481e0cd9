"""What a repair gets in a container: all that extract gets, as it runs the same engine."""

import pytest

from pipeline.containers.plan import Request, image_kind, stages_to_run

from .test_plan import planned, settings_of, values


def test_a_repair_runs_alone_whatever_is_sealed() -> None:
    assert stages_to_run(Request("repair", "tiny"), settings_of("tiny")) == ["repair"]


@pytest.mark.parametrize("profile", ["tiny", "tiny-sglang", "kimi-k2.5"])
def test_a_repair_gets_what_extract_gets(profile: str) -> None:
    [repair] = planned("repair", profile)
    extract = planned("extract", profile)[-1]
    settings = settings_of(profile)
    assert image_kind("repair", settings) == image_kind("extract", settings)
    assert (repair.image, repair.gpus, repair.mounts) == (
        extract.image,
        extract.gpus,
        extract.mounts,
    )
    for option in ("--mount", "--shm-size", "--gpus", "--network", "--ulimit", "--tmpfs"):
        assert values(repair, option) == values(extract, option)
    command = repair.command
    assert command[3] == "repair"
    assert command[command.index("--container") + 1] == repair.name
    assert "--image-facts" in command


def test_only_a_verify_is_asked_for_json() -> None:
    [asked] = planned("verify", "tiny", as_json=True)
    assert asked.command[-1] == "--json"
    [plain] = planned("verify", "tiny")
    assert "--json" not in plain.command
    [repair] = planned("repair", "tiny", as_json=True)
    assert "--json" not in repair.command
