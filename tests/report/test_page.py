import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.evaluation.acceptance import Acceptance, Difference, PositionRate
from pipeline.report.facts import (
    Boundary,
    Piece,
    ReportFacts,
    SampleText,
    Split,
    StageRun,
    StepPoint,
    TrainingFacts,
)
from pipeline.report.page import render_page, write_report

BARE = ReportFacts(run="first", profile="tiny", target="toy", version="0.1.0", made_at="2026-01-01")

ACCEPTANCE = Acceptance(
    prompts=8,
    identical=8,
    draft_tokens=2,
    tokens=180,
    passes=100,
    plain_passes=180,
    positions=(PositionRate(0, 98, 98, 50), PositionRate(1, 96, 48, 30)),
    tokens_per_pass=(50, 20, 30),
    plain_seconds=9.0,
    drafted_seconds=6.0,
    plain_prefill_seconds=1.0,
    drafted_prefill_seconds=1.5,
    first_difference=None,
)

FULL = replace(
    BARE,
    boundaries=(
        Boundary("prepare", "records", 500, 480, {"no_end_of_turn": 12, "nothing_supervised": 8}),
        Boundary("extract", "samples", 480, 480),
    ),
    splits=(Split("train", 440, 50000, 30000), Split("held_out", 40, 5000, 3100)),
    training=TrainingFacts(
        steps=tuple(
            StepPoint(
                i + 1, i / 80, 6.0 / (1 + i / 40) + 2, (0.4 * i / 240, 0.3 * i / 240, 0.2 * i / 240)
            )
            for i in range(240)
        ),
        held_out=tuple(
            StepPoint(80 * e, float(e), 7.5 - 1.4 * e, (0.1 * e, 0.09 * e, 0.08 * e), 1.0 + 0.2 * e)
            for e in range(4)
        ),
    ),
    acceptance=ACCEPTANCE,
    samples=(
        SampleText(
            "c-17",
            "train",
            21,
            9,
            (
                Piece(
                    "<|im_start|>user\nWhat is <b>HTML</b>?<|im_end|>\n<|im_start|>assistant\n",
                    False,
                ),
                Piece("A markup language.<|im_end|>", True),
                Piece("\n", False),
            ),
        ),
    ),
    stages=(StageRun("prepare", 32.5, "ab12" * 16, "2026-01-01T10:00:00Z"),),
    settings=(("train.epochs", "4", "profile smollm2"),),
    host=(("CPU", "2 cores"), ("GPU", "none")),
    versions=(("torch", "2.13.0"),),
    notices=("The drafter was trained on at most 512 tokens.",),
)


def test_report_is_one_page_and_a_png_for_each_chart(tmp_path: Path) -> None:
    written = write_report(tmp_path, FULL)
    assert [path.name for path in written] == [
        "report.html",
        "records.png",
        "loss.png",
        "accuracy.png",
        "acceptance.png",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in written)
    for path in written[1:]:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(data) > 5000


def test_page_loads_nothing_from_outside() -> None:
    page = render_page(FULL)
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", own)
    assert "url(" not in own
    assert "@import" not in own


def test_plotly_is_inlined_exactly_once() -> None:
    assert render_page(FULL).count("* plotly.js v") == 1


def test_markup_in_a_conversation_stays_text() -> None:
    page = render_page(FULL)
    assert "What is &lt;b&gt;HTML&lt;/b&gt;?" in page
    assert "<b>HTML" not in page


def test_only_supervised_text_is_highlighted() -> None:
    sample = render_page(FULL).split('<div class="sample">')[1].split("</div>")[0]
    assert re.findall("<mark>(.*?)</mark>", sample) == ["A markup language.&lt;|im_end|&gt;"]


def test_a_reason_that_closes_the_script_cannot_leave_the_chart() -> None:
    hostile = "</script><script>alert(1)</script>"
    page = render_page(replace(BARE, boundaries=(Boundary("prepare", hostile, 3, 3),)))
    assert hostile not in page
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    "shown",
    [
        "1.80",  # 180 tokens / 100 passes
        "8 of 8",
        "1.50\N{MULTIPLICATION SIGN}",
        "62.5%",  # 30 of 48 reached
        "31.2%",  # 30 of 96 judged
        "no_end_of_turn",
        "The drafter was trained on at most 512 tokens.",
        "ab12" * 16,
        "profile smollm2",
    ],
)
def test_page_shows(shown: str) -> None:
    assert shown in render_page(FULL)


def test_parts_that_have_not_run_are_named_and_draw_nothing(tmp_path: Path) -> None:
    written = write_report(tmp_path, BARE)
    assert [path.name for path in written] == ["report.html"]
    page = written[0].read_text()
    for line in ("No drafter has been trained", "not been evaluated", "No stage has counted"):
        assert line in page


def test_a_difference_is_shown_with_its_gaps() -> None:
    difference = Difference("p-3", 14, 7, 9, 2e-6, 1e-6)
    changed = replace(ACCEPTANCE, identical=7, first_difference=difference)
    page = render_page(replace(FULL, acceptance=changed))
    assert "7 of 8" in page
    assert "answer position 14: plain token 7 (gap to the next best logit 2e-06)" in page


def test_same_facts_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = write_report(tmp_path / "a", FULL)
    second = write_report(tmp_path / "b", FULL)
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_each_file_written_is_reported() -> None:
    counted: list[int] = []
    with pytest.raises(FileNotFoundError):
        write_report(Path("/nonexistent/folder"), FULL, advance=counted.append)
    assert counted == []
