from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation.sglang_drafter import drafter_flags, wrong_drafting


def value_of(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_the_server_counts_the_verified_token_among_its_drafts() -> None:
    flags = drafter_flags(Path("/x/export"), draft_tokens=3, device="cuda")
    assert value_of(flags, "--speculative-algorithm") == "EAGLE3"
    assert value_of(flags, "--speculative-draft-model-path") == "/x/export"
    assert value_of(flags, "--speculative-num-steps") == "3"
    assert value_of(flags, "--speculative-eagle-topk") == "1"
    assert value_of(flags, "--speculative-num-draft-tokens") == "4"


def test_only_a_cpu_needs_other_attention_backends() -> None:
    cpu = drafter_flags(Path("x"), draft_tokens=1, device="cpu")
    gpu = drafter_flags(Path("x"), draft_tokens=1, device="cuda")
    assert value_of(cpu, "--decode-attention-backend") == "intel_amx"
    assert cpu[: len(gpu)] == gpu
    assert "--decode-attention-backend" not in gpu


DRAFTING: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "dtype": "float32",
}


def test_a_server_with_the_flags_it_was_given_passes() -> None:
    assert not wrong_drafting(DRAFTING, draft_tokens=3, dtype="float32")
    plain = {"speculative_algorithm": None, "dtype": "bfloat16"}
    assert not wrong_drafting(plain, draft_tokens=None, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_algorithm", None),
        ("speculative_algorithm", "EAGLE"),
        ("speculative_num_steps", 5),
        ("speculative_eagle_topk", 4),
        ("speculative_num_draft_tokens", 8),
        ("dtype", "bfloat16"),
    ],
)
def test_a_flag_that_the_server_changed_is_named(name: str, value: Any) -> None:
    (problem,) = wrong_drafting(DRAFTING | {name: value}, draft_tokens=3, dtype="float32")
    assert problem.startswith(f"{name} is {value!r}")


def test_a_server_that_drafts_is_no_plain_one() -> None:
    (problem,) = wrong_drafting(DRAFTING, draft_tokens=None, dtype="float32")
    assert problem == "speculative_algorithm is 'EAGLE3', not None"
