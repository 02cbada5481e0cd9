import json

import pytest

from pipeline.draft.config import DrafterConfig
from pipeline.draft.errors import ConfigError
from tests.draft.make import CONFIG, make_config


def test_json_gives_the_same_config_back():
    values = json.loads(
        json.dumps(make_config(rope_scaling={"type": "linear", "factor": 2}).to_json())
    )
    assert DrafterConfig.from_json(values).rope_type == "linear"
    assert DrafterConfig.from_json(CONFIG.to_json()) == CONFIG


def test_a_width_unlike_the_targets_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"width 32, target width 48"):
        make_config(hidden_size=32, target_hidden_size=48)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 5},
        {"head_dim": 3},
        {"heads": 0},
        {"intermediate_size": True},
        {"draft_vocabulary_size": 12},
        {"rms_norm_eps": 0.0},
        {"taps": (1, 2)},
        {"taps": (1, 3, 2)},
        {"taps": (1, 1, 2)},
        {"taps": (-1, 1, 2)},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(changes):
    with pytest.raises(ConfigError):
        make_config(**changes)


@pytest.mark.parametrize("change", [{"hidden_size": None}, {"unknown": 1}])
def test_missing_and_unknown_keys_are_refused(change):
    values = {**CONFIG.to_json(), **change}
    values = {key: value for key, value in values.items() if value is not None or key not in change}
    with pytest.raises(ConfigError, match=next(iter(change))):
        DrafterConfig.from_json(values)
