"""B04: what has nothing left to supervise is dropped and counted; only such records end the run."""

from tests.field_reports.talks_fixtures import (  # noqa: F401
    Talks,
    front,
    plain_target_fixture,
    talk,
    talks_fixture,
)

LONG = "é" * 50  # 100 tokens here: its bytes
SHORT = [talk(f"How many is {n}?", f"It is {n}.") for n in range(7)]
LENGTH = ("--set", "prepare.max_length=64")


def long_talk(number: int) -> dict[str, object]:
    return talk(LONG + str(number), "é" * 5)


def test_the_prompt_is_longer_than_the_limit_by_itself(talks: Talks):
    talks.kept([long_talk(1), long_talk(2)])
    for ids, mask in talks.samples():
        assert mask.index(True) > 100
        assert sum(mask) == 11
        assert len(ids) < 256


def test_one_among_seven_good_ones_is_dropped_and_counted(talks: Talks):
    counts = talks.kept([*SHORT[:3], long_talk(1), *SHORT[3:]], *LENGTH)
    assert (counts["read"], counts["kept"]) == (8, 7)
    assert counts["skipped"] == {"nothing_supervised": 1}
    [skip] = talks.skips()
    assert skip["place"] == "talks.jsonl line 4"
    assert [answers for answers, _ in talks.islands()] == [
        [f"It is {n}.<|im_end|>"] for n in range(7)
    ]


def test_a_whole_batch_of_them_is_dropped_and_the_others_stay(talks: Talks):
    records = [*map(long_talk, range(40)), *SHORT]
    counts = talks.kept(records, *LENGTH, "--set", "prepare.least_kept_share=0.1")
    assert (counts["kept"], counts["skipped"]) == (7, {"nothing_supervised": 40})
    assert all(any(mask) for _, mask in talks.samples())


def test_a_file_of_only_these_ends_with_an_error_that_says_so(talks: Talks):
    error = talks.refused(talks.write([long_talk(1), long_talk(2)]), *LENGTH)
    assert "0 of 2 records kept, no supervised token is left" in error
    assert "{'nothing_supervised': 2}" in error
    assert "talks.jsonl line 1: nothing_supervised: no answer within the first 64 tokens" in error
    assert not (talks.output / "manifest.json").exists()


def test_text_that_was_rendered_before_ends_with_an_error_that_says_so(talks: Talks):
    header = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    error = talks.refused(talks.write([{"text": header + str(n)} for n in range(3)]))
    assert "0 of 3 records kept, no supervised token is left" in error
    assert "no_conversation: neither messages nor conversations; fields: text" in error


def test_a_stage_that_needs_the_samples_does_not_run_on_nothing(talks: Talks):
    arguments = talks.arguments(talks.write([long_talk(1)]), *LENGTH)
    done = front("train", *arguments[1:])
    assert done.status == 1
    assert "no supervised token is left" in done.err
    assert not (talks.output.parent / "train").exists()


def test_dropped_records_change_nothing_of_the_others(talks: Talks):
    talks.kept(SHORT, *LENGTH)
    alone = (talks.output / "samples-00000.safetensors").read_bytes()
    mixed = [one for n, short in enumerate(SHORT) for one in (long_talk(n), short)]
    talks.kept(mixed, *LENGTH)
    assert (talks.output / "samples-00000.safetensors").read_bytes() == alone
