"""B21: what the tokenizer's calls give is asserted; another kind never becomes "too short".

The lock files have one transformers each: 5.24.0 here and in the trainer's image, 5.19.0, the
oldest, with SGLang. Both answer a mapping to a template call with tokenize=True, so that is never
made.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import BatchEncoding, PreTrainedTokenizerFast

from tests.field_reports.talks_fixtures import (  # noqa: F401
    Talks,
    plain_target_fixture,
    talk,
    talks_fixture,
)

FIVE = [talk(f"How many is {n}?", f"It is {n}.") for n in range(5)]


def test_five_talks_are_five_samples_of_plain_ids(talks: Talks):
    counts = talks.kept(FIVE)
    assert (counts["read"], counts["kept"], counts["skipped"]) == (5, 5, {})
    for number, (ids, _) in enumerate(talks.samples()):
        assert talks.tokenizer.decode(ids) == (
            f"<|im_start|>user\nHow many is {number}?<|im_end|>\n"
            f"<|im_start|>assistant\nIt is {number}.<|im_end|>\n"
        )
        assert ids[0] == 2
        assert ids.count(3) == 2


def a_mapping(self: Any, messages: Any, **options: Any) -> BatchEncoding:
    return BatchEncoding({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]})


def nested(self: Any, text: str, **options: Any) -> BatchEncoding:
    return BatchEncoding({"input_ids": [[1, 2, 3]]})


def floats(self: Any, text: str, **options: Any) -> BatchEncoding:
    return BatchEncoding({"input_ids": [1.0, 2.0]})


DOUBLES = [
    ("apply_chat_template", a_mapping, "apply_chat_template(tokenize=False) gave a BatchEncoding"),
    ("__call__", nested, "tokenizer(text)['input_ids'] gave a list"),
    ("__call__", floats, "tokenizer(text)['input_ids'] gave a list"),
]


@pytest.mark.parametrize(("call", "double", "found"), DOUBLES)
@pytest.mark.parametrize("answers", ["file", "target"])
def test_another_type_ends_the_stage_and_is_named(
    talks: Talks, monkeypatch: pytest.MonkeyPatch, call, double, found, answers
):
    monkeypatch.setattr(PreTrainedTokenizerFast, call, double)
    error = talks.refused(talks.write(FIVE), "--set", f"prepare.answers={answers}")
    assert found in error
    assert "too" not in error
    assert not (talks.output / "manifest.json").exists()


def test_a_stage_that_keeps_less_than_its_share_ends_with_the_counts(talks: Talks):
    records = [*FIVE[:2], talk("x", ""), talk("y", ""), {"text": "z"}]
    error = talks.refused(talks.write(records))
    assert "2 of 5 records kept; skipped: {'empty_answer': 2, 'no_conversation': 1}" in error
    assert "least_kept_share, 50%" in error


RENDER = """
import json, sys
from pathlib import Path
import transformers
from pipeline.conversations.normalise import normalise
from pipeline.conversations.render import Renderer
from pipeline.target.tokenizer import load_tokenizer
renderer = Renderer(
    load_tokenizer(Path(sys.argv[1]), remote_code=False),
    end_of_turn_ids=frozenset({3}), max_length=256, too_long="cut",
)
found = [renderer.sample(normalise(one)) for one in json.loads(sys.argv[2])]
print(json.dumps([transformers.__version__, [[one.input_ids, one.supervised] for one in found]]))
"""


@pytest.mark.sglang
def test_the_oldest_locked_transformers_gives_the_same_ids(talks: Talks):
    """That is the server's, in its own environment."""
    root = Path(__file__).parents[2]
    talks.kept(FIVE)
    done = subprocess.run(
        [root / ".venv-sglang/bin/python", "-c", RENDER, talks.target, json.dumps(FIVE)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    version, found = json.loads(done.stdout)
    assert version == "5.19.0"
    assert [(ids, mask) for ids, mask in found] == talks.samples()
