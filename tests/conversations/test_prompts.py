import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.conversations.errors import ConversationError
from pipeline.conversations.prompts import read_prompts

TALKS = {
    "a": {
        "prompt": "What is your dream holiday?",
        "messages": [
            [{"text": "Hello"}, {"text": "how are  you\ndoing today?"}],
            [{"text": "And what about yours then?"}, {"text": "What is your dream holiday"}],
        ],
    },
    "b": {
        "prompt": None,
        "messages": [
            [{"text": "HOW ARE YOU DOING TODAY??"}, {"text": "Did he tell you about dinner?"}],
            [
                {"text": "Is anyone alive in here today?"},
                {"text": "Do you\u2019d like tea or milk?"},
            ],
            [{"text": "Why not?"}, {"text": "Why " + "very " * 60 + "long?"}],
        ],
    },
    "c": {"messages": []},
}
TOPIC = """\
categories: [x]
conversations:
- - what is crystallography
  - A science.
- - hi
  - Hey
"""
WANTED = {
    "What is your dream holiday?",
    "HOW ARE YOU DOING TODAY??",  # the lesser spelling of two
    "Do you\u2019d like tea or milk?",
    "what is crystallography",
}


def write_wheel(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    return [
        write_wheel(tmp_path / "c.whl", {"chitchat_dataset/dataset.json": json.dumps(TALKS)}),
        write_wheel(
            tmp_path / "b.whl",
            {
                "chatterbot_corpus/data/english/science.yml": TOPIC,
                "chatterbot_corpus/data/german/wissenschaft.yml": "not: read",
            },
        ),
    ]


def test_only_questions_that_stand_alone_are_kept_each_once(wheels: list[Path]) -> None:
    assert sorted(read_prompts(wheels, 4, 0)) == sorted(WANTED)


def test_the_order_depends_on_the_seed_alone(wheels: list[Path]) -> None:
    forward, backward = read_prompts(wheels, 4, 3), read_prompts(wheels[::-1], 4, 3)
    orders = {tuple(read_prompts(wheels, 4, seed)) for seed in range(8)}
    assert forward == backward
    assert len(orders) > 1


def test_fewer_prompts_are_the_first_of_more(wheels: list[Path]) -> None:
    assert read_prompts(wheels, 2, 5) == read_prompts(wheels, 4, 5)[:2]


@pytest.mark.parametrize("count", [0, 5])
def test_a_count_that_cannot_be_had_is_refused(wheels: list[Path], count: int) -> None:
    with pytest.raises(ConversationError, match="4 different questions"):
        read_prompts(wheels, count, 0)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda path: path.write_bytes(b"no zip"),
        lambda path: path.unlink(),
        lambda path: write_wheel(path, {"other.py": ""}),
        lambda path: write_wheel(path, {"chitchat_dataset/dataset.json": "{"}),
        lambda path: write_wheel(path, {"chitchat_dataset/dataset.json": '{"a": {}}'}),
        lambda path: write_wheel(path, {"chatterbot_corpus/data/english/a.yml": "a: [b: c: d"}),
    ],
)
def test_a_wheel_that_holds_no_talks_is_named(
    tmp_path: Path, break_it: Callable[[Path], object]
) -> None:
    wheel = write_wheel(tmp_path / "bad.whl", {})
    break_it(wheel)
    with pytest.raises(ConversationError, match=r"bad\.whl"):
        read_prompts([wheel], 1, 0)
