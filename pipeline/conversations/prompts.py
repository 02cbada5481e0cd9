"""Real human questions, read out of two public wheels for the default profile.

chitchat-dataset holds talks between people (one JSON file), chatterbot-corpus holds openings by
topic (YAML files). Both are read as zip members; nothing of them is imported.
"""

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.conversations.errors import ConversationError

_CHITCHAT_MEMBER = "chitchat_dataset/dataset.json"
_CHATTERBOT_MEMBER = re.compile(r"chatterbot_corpus/data/english/[^/]+\.yml")

_WORDS_LEAST, _WORDS_MOST = 5, 60
_OPENER_WORDS_LEAST = 3  # chatterbot's openings are whole by themselves: "what is crystallography"

# A question out of the middle of a talk is understood alone only when it asks for itself; "And
# yours?" or "Probably Greece, you?" is not. Hence: it begins with one of these words.
_ASKING = re.compile(
    r"(what|what's|whats|who|who's|where|when|which|why|how|how's|do|does|did|is|are|was|were|can"
    r"|could|would|will|should|have|has|if|tell|explain|describe|name|in)"
)
# A word that points at something said before, which a model asked afresh has not heard.
_POINTING = re.compile(
    r"(he|he's|she|she's|they|they're|them|him|his|her|hers|their|it|it's|its|that|that's|this"
    r"|those|these|there|there's|here|then|ones?)"
)
# Talk about the chat itself (glitches, silence) is no question to a model.
_ABOUT_THE_CHAT = re.compile(r"(chats?|bubbles?|glitch|glitched|glitchy|hello|anyone)")


def read_prompts(wheels: Sequence[Path], count: int, seed: int) -> list[str]:
    """`count` different questions from the wheels, in an order that `seed` alone decides.

    wheels: wheel files that hold one of the two data sets each; others are refused. Two questions
    that differ only in case, punctuation or spacing are one. The order is by digest, so it depends
    on neither the order of the wheels nor this Python's random numbers.
    ConversationError when a wheel holds neither set or is broken, or there are too few questions.
    """
    by_key: dict[str, str] = {}
    for wheel in wheels:
        for text in _questions(wheel):
            key = _key(text)
            # The least spelling stays, whichever came first.
            by_key[key] = min(text, by_key.get(key, text))
    if not 0 < count <= len(by_key):
        raise ConversationError(
            f"{len(by_key)} different questions in {', '.join(wheel.name for wheel in wheels)}",
            wanted=f"{count}",
            next_step=f"set the number of prompts to 1..{len(by_key)}",
        )
    order = sorted(by_key, key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    return [by_key[key] for key in order[:count]]


def _questions(wheel: Path) -> Iterator[str]:
    """All usable questions of one wheel, repeats included. ConversationError as read_prompts."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(archive.namelist())
            topics = [name for name in names if _CHATTERBOT_MEMBER.fullmatch(name)]
            if _CHITCHAT_MEMBER in names:
                yield from _from_chitchat(json.loads(archive.read(_CHITCHAT_MEMBER)))
            elif topics:
                for name in topics:
                    yield from _from_chatterbot(yaml.safe_load(archive.read(name)))
            else:
                raise ConversationError(
                    f"{wheel}: neither {_CHITCHAT_MEMBER} nor English topics of chatterbot-corpus",
                    wanted="a wheel of chitchat-dataset or chatterbot-corpus",
                    next_step="correct the wheels of the prompts in the profile",
                )
    except (
        OSError,
        zipfile.BadZipFile,
        zlib.error,
        ValueError,
        LookupError,
        TypeError,
        yaml.YAMLError,
    ) as error:
        raise ConversationError(
            f"{wheel}: {type(error).__name__}: {error}",
            wanted="a whole wheel of chitchat-dataset or chatterbot-corpus",
            next_step="delete the file and run the stage again",
        ) from error


def _from_chitchat(talks: dict[str, Any]) -> Iterator[str]:
    """Each talk's topic question, and each single utterance that asks for itself."""
    for talk in talks.values():
        texts = [talk.get("prompt") or ""]  # some talks had no topic
        texts += [utterance["text"] for turn in talk["messages"] for utterance in turn]
        for raw in texts:
            text = _tidy(raw)
            if text.endswith("?") and _asks_for_itself(text):
                yield text


def _from_chatterbot(topic: dict[str, Any]) -> Iterator[str]:
    """Each talk's opening."""
    for talk in topic["conversations"]:
        text = _tidy(str(talk[0]))
        if _OPENER_WORDS_LEAST <= len(text.split()) <= _WORDS_MOST:
            yield text


def _tidy(text: str) -> str:
    """The text in one line, spaces single. Nothing else is corrected: people write like this."""
    return " ".join(text.split())


def _asks_for_itself(text: str) -> bool:
    """Whether a question stands alone by the rules at the head of this module."""
    plain = text.replace("\u2019", "'").casefold()
    words = [word.strip('.,!?;:"()') for word in plain.split()]
    return (
        _WORDS_LEAST <= len(words) <= _WORDS_MOST
        and _ASKING.fullmatch(words[0]) is not None
        and not any(_POINTING.fullmatch(word) or _ABOUT_THE_CHAT.fullmatch(word) for word in words)
    )


def _key(text: str) -> str:
    """What two spellings of one question share: its letters and digits, in lower case."""
    return " ".join(re.findall(r"\w+", text.casefold().replace("'", "").replace("\u2019", "")))
