from pathlib import Path

import pytest

from pipeline.settings.environment import child_environment, stage_environment
from pipeline.settings.errors import SettingsError
from pipeline.settings.load import (
    flatten,
    load_settings,
    origin_of,
    plain_absolute,
    profile_files,
    shipped_profiles,
)


@pytest.mark.parametrize("profile", ["smollm2", "tiny", "kimi-k2.5"])
def test_every_shipped_profile_is_valid(profile: str) -> None:
    assert profile in shipped_profiles()
    loaded = load_settings(profile)
    assert loaded.settings.folder.name == profile


def test_the_kimi_profile_is_the_one_that_people_run() -> None:
    settings = load_settings("kimi-k2.5").settings
    server = settings.extract.server
    assert settings.extract.taps == (3, 31, 59)
    assert (server.tensor_parallel, server.memory_fraction) == (8, 0.85)
    assert (server.radix_cache, server.cuda_graphs) == (False, False)
    assert settings.run.nccl == Path("/etc/cleanslate/nccl.json")  # of the host,
    assert server.nccl == settings.train.nccl == {}  # so that nothing here wins over it
    assert settings.extract.staging_quota_bytes == 128 << 30
    assert settings.draft.vocabulary_size == 32000
    assert (settings.train.ttt_steps, settings.train.learning_rate) == (5, 3e-5)
    assert settings.train.warmup_share > 0
    assert (settings.train.epochs, settings.train.gpus) == (5, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        ("train.epoks=3", "train.epoks", "epochs, learning_rate"),
        ("train.epochs=many", "train.epochs is 'many'", "valid integer"),
        ("train.epochs=3.5", "train.epochs is 3.5", "valid integer"),
        ("train.epochs='3'", "train.epochs is '3'", "valid integer"),
        ("train.epochs=true", "train.epochs is True", "valid integer"),
        ("train.epochs=0", "train.epochs is 0", "greater than or equal to 1"),
        ("train.loss=mse", "train.loss is 'mse'", "'kl' or 'tv'"),
        ("extract.taps=[3,2,9]", "extract", "rise without repeats"),
        ("extract.taps=[2,2,9]", "extract", "rise without repeats"),
        ("extract.taps=[-1,2,9]", "extract.taps.0 is -1", "greater than or equal to 0"),
        ("extract.taps=[1,2]", "extract.taps", "at least 3 items"),
        ("extract.server.radix_cache=true", "extract.server.radix_cache is True", "False"),
        ("target.source.kind=zip", "target.source", "'gguf_wheel', 'folder', 'random'"),
        ("run.name=../elsewhere", "run.name", "pattern"),
        ("train.tokens_per_step=100", "train", "below train.tokens_per_pack"),
        ("train.gpus=[0,1]", "train", "train.ranks is 1"),
        ("prepare.input=x.jsonl", "prepare", "set one to null"),
        ("nothing.at.all=1", "nothing", "description, run, target"),
        ("train.nccl={nccl_proto: LL}", "train.nccl", "pattern"),
    ],
)
def test_a_wrong_value_is_refused_naming_key_and_allowed_values(
    override: str, key: str, allowed: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings("smollm2", overrides=[override])
    assert key in caught.value.found
    assert allowed in caught.value.wanted


@pytest.mark.parametrize("text", ["train.epochs", "=3", "train..epochs=3", "train.epochs=[1"])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="override"):
        load_settings("smollm2", overrides=[text])


def test_origins_name_profile_override_and_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: smollm2\ntrain:\n  epochs: 9\n")
    loaded = load_settings(str(path), overrides=["train.seed=5"])
    origins = {key: origin_of(key, loaded.origins) for key, _, _ in flatten(loaded.settings)}
    assert origins["train.epochs"] == "profile mine.yaml"
    assert origins["train.learning_rate"] == "profile smollm2.yaml"
    assert origins["train.seed"] == "override"
    assert origins["train.keep_checkpoints"] == "default"
    assert loaded.settings.run.name == "mine"


def test_another_kind_of_target_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: smollm2\ntarget:\n  source: {kind: folder, path: models/x}\n")
    source = load_settings(str(path)).settings.target.source
    assert source.kind == "folder"
    assert source.path == tmp_path / "models" / "x"  # relative to the profile


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: nowhere\n", "'nowhere' does not exist"),
        (f"extends: {'x' * 300}\n", "File name too long"),
        ("extends: mine.yaml\n", "circle"),
        ("train: {epochs: 1, epochs: 2}\n", "stands twice"),
        ("- a list\n", "holds list"),
        ("train: [\n", "profile"),
        ("train: !!python/object/apply:os.system ['true']\n", "profile"),
    ],
)
def test_a_broken_profile_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        load_settings(str(path))


def test_settings_cannot_be_changed_after_loading() -> None:
    settings = load_settings("tiny").settings
    with pytest.raises(ValueError, match="frozen"):
        settings.train.epochs = 2  # type: ignore[misc]


def test_a_child_gets_what_its_stage_sets_and_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    stage = stage_environment(threads=2, gpus=(3, 1), extra={"NCCL_ALGO": "Ring"})
    child = child_environment(stage)
    assert "NCCL_PROTO" not in child
    assert child["OMP_NUM_THREADS"] == "2"
    assert child["OMP_WAIT_POLICY"] == "PASSIVE"
    assert child["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert child["NCCL_ALGO"] == "Ring"
    assert "PATH" in child


def test_the_files_of_a_chain_are_known_as_far_as_they_exist(tmp_path: Path) -> None:
    mine, base = tmp_path / "mine.yaml", tmp_path / "more" / "base.yaml"
    mine.write_text("extends: more/base.yaml\n")
    assert profile_files(str(mine)) == [mine, base]
    base.parent.mkdir()
    base.write_text("extends: tiny\n")
    assert profile_files(str(mine)) == [mine, base]
    base.write_text("extends: ../mine.yaml\n")
    assert len(profile_files(str(mine))) == 8
    assert profile_files("tiny") == []


def test_a_path_with_dots_names_the_same_file_without_them(tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far" / "away")
    for own in ("near/../near/link", "near/link/../file", "../x/..", "absent/../../file"):
        plain = plain_absolute(tmp_path / own)
        assert ".." not in plain.parts
        assert plain.resolve() == (tmp_path / own).resolve()
    assert plain_absolute(tmp_path / "near" / "link") == tmp_path / "near" / "link"
    assert plain_absolute(tmp_path / "far" / ".." / "near" / "link") == tmp_path / "near" / "link"
