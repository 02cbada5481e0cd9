"""B17: each record renders as if read alone; tool calls are supervised, tool results are not."""

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.field_reports.talks_fixtures import (  # noqa: F401
    CHATML,
    Talks,
    plain_target_fixture,
    talk,
    with_template,
)

# Prints what it is given: tool declarations in front, calls behind the text, results as a turn.
TOOLS = """\
{%- if tools %}{{- '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | string }}
{%- for call in message.get('tool_calls', []) %}
{%- set arguments = call['function']['arguments'] %}
{{- '[' + call['function']['name'] + ' ' }}
{{- arguments if arguments is string else arguments | tojson }}{{- ']' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
FOR = [{"type": "function", "function": {"name": "clock", "description": "tells the time"}}]


@pytest.fixture
def tools(plain_target: Path, tmp_path: Path) -> Talks:
    """Talks for a target whose template knows tools."""
    return Talks(tmp_path, with_template(plain_target, tmp_path / "target", TOOLS))


def calling(arguments: Any, *, name: str = "clock", **fields: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": f"When? {name}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "RESULT 12:00"},
            {"role": "assistant", "content": "At noon."},
        ],
        **fields,
    }


CALLS = [
    (calling({"time": "2025"}, name="a"), '[a {"time": "2025"}]'),
    (calling({"time": 2025}, name="b"), '[b {"time": 2025}]'),
    (calling('{"time": 2025, "zone": null}', name="c"), '[c {"time": 2025, "zone": null}]'),
    (calling({"zone": None}, name="d"), '[d {"zone": null}]'),
    (calling({}, name="e"), "[e {}]"),
    (calling([1, "2"], name="f", score=0.5, extra={"x": None}), '[f [1, "2"]]'),
]


def written(talks: Talks, records: list[dict[str, Any]], kind: str) -> Path:
    path = talks.root / f"talks.{kind}"
    if kind == "json":
        path.write_text(json.dumps(records))
        return path
    return talks.write(records, path.name)


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_arguments_of_any_type_render_as_they_stand_in_their_own_record(tools: Talks, kind):
    done = tools.prepare(written(tools, [record for record, _ in CALLS], kind))
    assert done.status == 0, done.err
    for (_, call), (supervised, rest) in zip(CALLS, tools.islands(), strict=True):
        assert supervised == [call + "<|im_end|>", "At noon.<|im_end|>"]
        assert "RESULT 12:00" in "".join(rest)
        assert "None" not in "".join(rest)


def test_a_record_renders_the_same_alone_and_among_others(tools: Talks):
    tools.kept([record for record, _ in CALLS])
    together = tools.samples()
    for number, (record, _) in enumerate(CALLS):
        tools.kept([record, talk("A?", "Yes.")])
        assert tools.samples()[0] == together[number]


def test_each_record_has_its_own_declarations_and_they_are_not_supervised(tools: Talks):
    records = [
        calling({}, name="a", tools=FOR),
        calling({}, name="b"),
        calling({}, name="c", tools=json.dumps(FOR)),
    ]
    tools.kept(records)
    declared = (
        '<|im_start|>tools\n[{"type": "function", "function": {"name": "clock", '
        '"description": "tells the time"}}]<|im_end|>\n'
    )
    first, second, third = [rest[0] for _, rest in tools.islands()]
    asked = "<|im_start|>user\nWhen? {}<|im_end|>\n<|im_start|>assistant\n"
    assert first == declared + asked.format("a")
    assert second == asked.format("b")
    assert third == declared + asked.format("c")


def test_declarations_reach_the_target_when_it_writes_the_answers(tools: Talks):
    records = [calling({}, name="a", tools=FOR), calling({}, name="b")]
    source = tools.write(records)
    done = tools.prepare(
        source, "--set", "prepare.answers=target", "--set", "prepare.answering.max_new_tokens=3"
    )
    assert done.status == 0, done.err
    first, second = [tools.tokenizer.decode(ids) for ids, _ in tools.samples()]
    assert first.startswith('<|im_start|>tools\n[{"type": "function"')
    assert second.startswith("<|im_start|>user\nWhen? b<|im_end|>\n<|im_start|>assistant\n")


def test_a_list_of_text_parts_is_the_plain_string_and_an_image_is_refused(tools: Talks):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]
    image = {"type": "image_url", "image_url": {"url": "x.png"}}
    records = [
        talk("Hi", "Hello."),
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]},
        {"messages": [{"role": "user", "content": [image]}, {"role": "assistant", "content": "x"}]},
        talk("A?", "Yes."),
    ]
    counts = tools.kept(records)
    assert counts["skipped"] == {"duplicate": 1, "unsupported_content": 1}
    assert [skip["detail"] for skip in tools.skips()] == [
        "the same token ids as an earlier record",
        "messages[0]: part 0 is of type 'image_url', wanted text",
    ]


def test_null_content_without_calls_is_a_counted_skip_and_never_the_word_none(tools: Talks):
    silent = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]
    }
    counts = tools.kept([silent, talk("A?", "Yes."), talk("B?", "No.")])
    assert counts["skipped"] == {"null_content": 1}


def test_a_tables_nulls_for_what_other_rows_have_do_not_change_the_text(tools: Talks):
    rows = [
        calling({"time": "2025"}, name="a", tools=FOR),
        calling({"zone": "UTC"}, name="b"),
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho."}]},
    ]
    tools.kept(rows)
    as_lines = tools.samples()
    path = tools.root / "talks.parquet"
    parquet.write_table(arrow.Table.from_pylist([{**row, "x": 1.5} for row in rows]), path)
    done = tools.prepare(path)
    assert done.status == 0, done.err
    assert tools.samples() == as_lines


def test_values_that_only_a_table_has_are_taken_as_text_or_refused(tools: Talks):
    def row(**more: Any) -> dict[str, Any]:
        first = {"role": "user", "content": "Hi " + str(*more), **more}
        return {"messages": [first, {"role": "assistant", "content": "Ho."}]}

    rows = [
        row(),
        row(at=datetime.datetime(2025, 1, 2, tzinfo=datetime.UTC)),
        row(price=Decimal("1.50")),
        row(picture=b"\x89PNG"),
    ]
    path = tools.root / "talks.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    done = tools.prepare(path)
    assert done.status == 0, done.err
    assert tools.counts()["skipped"] == {"unreadable": 1}
    [skip] = tools.skips()
    assert skip["place"] == "talks.parquet row 4"
    assert skip["detail"] == "holds a bytes, which JSON has not"


def test_a_template_that_fails_on_one_record_costs_only_that_one(tools: Talks, tmp_path: Path):
    template = CHATML.replace("message['content'] +", "message['content'] + message.get('x', '') +")
    talks = Talks(tmp_path, with_template(tools.target, tmp_path / "strict", template))
    numbers = talk("Hi", "Ho.")
    numbers["messages"][0]["x"] = 5
    counts = talks.kept([numbers, talk("A?", "Yes."), talk("B?", "No.")])
    assert counts["skipped"] == {"template_refused": 1}
    assert talks.skips()[0]["place"] == "talks.jsonl line 1"
