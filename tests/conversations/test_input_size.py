"""Large files: bounded memory, and every bad record among many counted and listed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.field_reports.talks_fixtures import (  # noqa: F401
    Talks,
    plain_target_fixture,
    talk,
    talks_fixture,
)

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
RECORDS, EVERY = 20_000, 100
BAD = [
    (b'{"messages": [', "unreadable"),
    (b"\0\0\0", "unreadable"),
    (b"[]", "not_a_record"),
    (b'{"messages": []}', "no_messages"),
    (b'{"messages": [{"role": "robot", "content": "x"}]}', "unknown_role"),
    (b'{"a": NaN}', "unreadable"),
    (b"\xff\xfe{", "unreadable"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "no_assistant_turn"),
    (b"role,content", "unreadable"),
    (
        b'{"messages": [{"role": "user", "content": "\\ud83d"},'
        b' {"role": "assistant", "content": "y"}]}',
        "bad_text",
    ),
]


def lines() -> Iterator[bytes]:
    for number in range(1, RECORDS + 1):
        if number % EVERY == 37:
            yield BAD[number // EVERY % len(BAD)][0]
        else:
            yield json.dumps(talk(f"{number}?", "A" * (number % 3 + 1) + str(number))).encode()


def test_each_bad_record_among_many_is_counted_and_listed_by_its_line(talks: Talks) -> None:
    path = talks.root / "many.jsonl"
    path.write_bytes(b"\n".join(lines()))
    done = talks.prepare(path)
    assert done.status == 0, done.err
    counts = talks.counts()
    assert (counts["read"], counts["kept"]) == (20_000, 19_800)
    assert counts["skipped"] == {
        "unreadable": 100,
        "not_a_record": 20,
        "no_messages": 20,
        "unknown_role": 20,
        "no_assistant_turn": 20,
        "bad_text": 20,
    }
    assert [(skip["place"], skip["reason"]) for skip in talks.skips()] == [
        (f"many.jsonl line {number}", BAD[number // 100 % 10][1])
        for number in range(37, 20_000, 100)
    ]


MEASURE = """
import json, sys
from pathlib import Path
from tests.field_reports.talks_fixtures import front
for arguments in json.loads(sys.argv[1]):
    done = front(*arguments)
    high = [one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one]
    print(done.status, high[0].split()[1], done.err.replace(chr(10), " "))
"""


def test_a_line_of_200_mb_is_refused_by_its_number_and_never_held_whole(talks: Talks) -> None:
    good = [json.dumps(talk(f"How many is {n}?", f"It is {n}.")).encode() for n in range(4)]
    short, long = talks.root / "short.jsonl", talks.root / "long.jsonl"
    short.write_bytes(b"\n".join(good))
    with long.open("wb") as file:
        file.write(b"\n".join(good[:2]) + b"\n{")
        file.seek(200 * MIB, 1)  # zeros that take no disk
        file.write(b"}\n" + b"\n".join(good[2:]))
    limit = ("--set", f"prepare.max_record_bytes={8 * MIB}")
    commands = [talks.arguments(path, *limit) for path in (short, long)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(commands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (status, before, _), (other, after, error) = (
        line.split(" ", 2) for line in done.stdout.splitlines()
    )
    assert (status, other) == ("0", "0"), error
    assert int(after) - int(before) < 64 << 10  # KiB
    assert talks.counts()["skipped"] == {"unreadable": 1}
    [skip] = talks.skips()
    assert (skip["place"], skip["detail"]) == (
        "long.jsonl line 3",
        f"longer than {8 * MIB} bytes",
    )
    assert len(talks.samples()) == 4
