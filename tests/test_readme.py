"""The table of field reports: every file of tests is in it, and every test it names is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS / "README.md").read_text(encoding="utf-8")
LINKS = re.findall(r"\]\(([\w/]+\.py)\)", TEXT)
ROWS = re.findall(r"^\| (B\d\d) \|.*\]\((field_reports/\w+\.py)\) \| (.*?) \|", TEXT, re.MULTILINE)


def test_every_kind_of_report_has_a_row() -> None:
    kinds = "01 02 03 04 05 06 08 09 10 11 13 15 16 17 19 21 24 26 28 30 32"
    assert [kind for kind, _, _ in ROWS] == [f"B{number}" for number in kinds.split()]


def test_every_file_of_them_is_in_the_table() -> None:
    files = {path.name for path in (TESTS / "field_reports").glob("test_*.py")}
    assert {Path(file).name for _, file, _ in ROWS} == files


def test_every_test_and_file_that_is_named_is_there() -> None:
    assert [link for link in LINKS if not (TESTS / link).is_file()] == []
    for _, file, names in ROWS:
        text = (TESTS / file).read_text(encoding="utf-8")
        found = re.findall(r"`(test_\w+)`", names)
        assert found
        assert [name for name in found if f"def {name}(" not in text] == []
