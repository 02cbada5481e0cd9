"""Chat templates are programs out of the target's folder: they reach nothing and end in time."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.conversations import template
from pipeline.conversations.errors import RendererError
from pipeline.conversations.template import render_template
from tests.hostile.bounded import Bounded
from tests.hostile.readers import TALK

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Expressions that are true where something outside was reached.
REACHES = {
    "a class": "''.__class__.__mro__",
    "globals of a function": "raise_exception.__globals__",
    "globals by a filter": "raise_exception|attr('__globals__')",
    "globals by a map": "[raise_exception]|map(attribute='__globals__')|first",
    "globals by format": "'{' in '{0.__globals__}'.format(raise_exception)",
    "builtins by a cycler": "cycler.__init__.__globals__",
    "a name of the interpreter's": "__import__ is defined or open is defined or self.__init__",
}
REFUSED = {
    "another file": "{% include '/etc/passwd' %}",
    "another file by import": "{% import '../../../etc/passwd' as x %}{{ x }}",
    "another file by extends": "{% extends '/etc/passwd' %}",
    "the messages, to change them": "{{ messages.append(1) }}",
    "a loop beyond the sandbox's": "{% for i in range(10**7) %}{% endfor %}",
    "nothing, divided": "{{ 1 / 0 }}",
}
OVERRUNS = {
    "a string of 10^10": "{{ 'a' * 10**10 }}",
    "a list of 10^10": "{{ [0] * 10**10 }}",
    "a string of 10^10 at run time": "{% set n = 10**10 %}{{ messages[0]['content'] * n }}",
    "a string that only the wall of templates stops": "{{ messages[0]['content'] * 150000000 }}",
    "a padded string of 10^10": "{{ 'a'.ljust(10**10) }}",
    "a formatted number of 10^10": "{{ '%010000000000d' % 1 }}",
    "a string doubled 60 times": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a number of 10^10 digits": "{{ 10**(10**10) }}",
}


def _write(folder: Path, text: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "chat_template": text}))


def test_the_usual_template_passes(good: dict[str, Path], bounded: Bounded) -> None:
    _write(good["template"].parent, CHATML)
    assert bounded.read("template", good["template"]) == {"kind": "read"}


@pytest.mark.parametrize("what", REACHES)
def test_nothing_outside_is_reached(what: str, good: dict[str, Path], bounded: Bounded) -> None:
    said = "{% if " + REACHES[what] + " %}{{ raise_exception('reached') }}{% endif %}"
    _write(good["template"].parent, CHATML + said)
    outcome = bounded.read("template", good["template"])
    assert outcome["kind"] in ("read", "skip"), outcome
    assert "reached" not in json.dumps(outcome)


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_sandbox_refuses_skips_the_conversation(
    what: str, good: dict[str, Path], bounded: Bounded
) -> None:
    _write(good["template"].parent, CHATML + REFUSED[what])
    outcome = bounded.read("template", good["template"])
    assert (outcome["kind"], outcome.get("type")) == ("skip", "template_refused"), outcome


@pytest.mark.parametrize("what", OVERRUNS)
def test_it_ends_in_time_and_in_memory(what: str, good: dict[str, Path], bounded: Bounded) -> None:
    _write(good["template"].parent, CHATML + OVERRUNS[what])
    outcome = bounded.read("template", good["template"], seconds=60.0)
    assert (outcome["kind"], outcome.get("type")) == ("fault", "RendererError"), outcome
    assert "chat template takes more than" in outcome["parts"][0]


def test_a_template_that_writes_too_much_skips_the_conversation(
    good: dict[str, Path], bounded: Bounded
) -> None:
    _write(good["template"].parent, CHATML + "{{ messages[0].role[:1] * 17825792 }}")
    outcome = bounded.read("template", good["template"])
    assert (outcome["kind"], outcome.get("type")) == ("skip", "too_much_text"), outcome


def split_by(expression: str, text: str, good: dict[str, Path], bounded: Bounded) -> dict[str, Any]:
    """What becomes of a text, given as Jinja, whose tokenizer splits it by an expression."""
    path = good["tokenizer"]
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    changed = {**json.loads(path.read_bytes()), "pre_tokenizer": {**split, "invert": False}}
    path.write_text(json.dumps(changed))
    _write(path.parent, text + CHATML)
    return bounded.read("template", good["template"])


def test_an_expression_that_tries_every_way_is_given_up(
    good: dict[str, Path], bounded: Bounded
) -> None:
    """Of a tokenizer's pieces: 2^40 ways to see that no run of `a` ends the text."""
    outcome = split_by("(a+)+$", "{{ 'a' * 40 }}!", good, bounded)
    assert (outcome["kind"], outcome.get("type")) == ("skip", "tokenizer_refused"), outcome


def test_an_expression_that_tries_many_ways_at_every_place_is_refused_in_time(
    good: dict[str, Path], bounded: Bounded
) -> None:
    """No match is given up, but each of 2000 takes 250,000 ways: 12 s, and longer texts more."""
    expression = "(?:a{0,700})(?:a{0,700})[^a]x"
    outcome = split_by(expression, "{{ 'a' * 2000 }}!!x", good, bounded)
    assert (outcome["kind"], outcome.get("type")) == ("fault", "RendererError"), outcome
    assert "the tokenizer takes more than 2 s" in outcome["parts"][0]


class Endless:
    """A tokenizer whose template never ends."""

    def apply_chat_template(self, messages: object, **options: object) -> str:
        while True:
            try:
                while True:
                    pass
            except Exception:  # noqa: S112  as a template engine may
                continue


def test_an_endless_template_is_stopped_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.1)
    with pytest.raises(RendererError, match="more than 0 s"):
        render_template(Endless(), TALK)
