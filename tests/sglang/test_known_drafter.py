"""A drafter that is right about the next token and wrong about those behind it, on the real server.

The target answers x + 1 to token x; the drafter says x + 2 to the row of token x at every step. So
each pass accepts one draft: acceptance length 2 exactly, by arithmetic, whatever the server is.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.capture.sglang_generate import Limits, Prompt, generate
from pipeline.capture.sglang_server import SglangServer
from pipeline.draft.export import export_drafter
from pipeline.evaluation.sglang_counts import ServerCounts, read_counts
from pipeline.evaluation.sglang_drafter import drafter_flags, wrong_drafting
from pipeline.target.facts import read_facts
from tests.evaluation.make import counting_target, drafter_config, random_drafter, vocabulary_of
from tests.sglang.tiny import make_llama, start_server

SIZE, TAPS = 512, (1, 2, 4)
NEW_TOKENS, DRAFTS = 33, 3
LIMITS = Limits(
    max_new_tokens=NEW_TOKENS, end_ids=frozenset({3}), concurrency=4, timeout_seconds=120.0
)

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_llama(folder)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    model = counting_target(SIZE)
    model.config.eos_token_id = 3
    model.generation_config.eos_token_id = 3
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drafting(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """A server whose drafter knows the even tokens alone."""
    folder = tmp_path_factory.mktemp("drafting")
    even = list(range(0, SIZE, 2))
    facts = read_facts(target)
    config = drafter_config(
        hidden_size=SIZE,
        target_hidden_size=SIZE,
        draft_vocabulary_size=len(even),
        target_vocabulary_size=SIZE,
        rms_norm_eps=1e-6,
        max_position_embeddings=facts.max_position_embeddings,
        taps=TAPS,
    )
    model = random_drafter(config, dtype=torch.float32)
    with torch.no_grad():
        model.fc.weight.copy_(torch.cat([torch.eye(SIZE), torch.zeros(SIZE, 2 * SIZE)], 1))
        model.midlayer.self_attn.o_proj.weight.zero_()
        model.midlayer.mlp.down_proj.weight.zero_()
        model.norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(torch.eye(SIZE).roll(2, 0)[even])
    export = folder / "export"
    export.mkdir()
    export_drafter(
        export, model.state_dict(), vocabulary_of(even, SIZE), config, target=facts, taps=TAPS
    )
    flags = drafter_flags(export, draft_tokens=DRAFTS, device="cpu")
    with start_server(target, folder, flags=flags) as server:
        yield server


def test_the_server_runs_with_the_flags_it_was_given(drafting: SglangServer) -> None:
    assert not wrong_drafting(drafting.server_info(), draft_tokens=DRAFTS, dtype="float32")


def test_each_pass_accepts_one_draft_but_the_one_outside_the_vocabulary(
    drafting: SglangServer,
) -> None:
    prompts = [
        Prompt("even", (50, 100)),
        Prompt("odd", (50, 101)),
        Prompt("long", (*[7] * 90, 200)),
    ]
    even, odd, long = generate(drafting, prompts, limits=LIMITS)
    assert even.output_ids == tuple(range(101, 101 + NEW_TOKENS))
    assert odd.output_ids == tuple(range(102, 102 + NEW_TOKENS))
    assert long.output_ids == tuple(range(201, 201 + NEW_TOKENS))
    # 101 by the prefill, then 102 and 103 by the first pass, 104 and 105 by the second, ...
    for one in (even, long):
        counts = read_counts(one.meta, draft_tokens=DRAFTS)
        assert counts == ServerCounts(tokens=32, passes=16, accepted=(0, 16))
    # 102 by the prefill; 103 cannot be drafted, so the first pass gives 103 alone; then two a pass,
    # of which the limit cuts the last one.
    counts = read_counts(odd.meta, draft_tokens=DRAFTS)
    assert counts == ServerCounts(tokens=32, passes=17, accepted=(1, 16))


def test_an_answer_of_one_token_has_no_pass(drafting: SglangServer) -> None:
    (one,) = generate(drafting, [Prompt("end", (50, 2))], limits=LIMITS)
    assert (one.output_ids, one.finish_reason) == ((3,), "stop")
    assert read_counts(one.meta, draft_tokens=DRAFTS) == ServerCounts(0, 0, ())


def test_an_accepted_draft_that_ends_the_answer_cuts_the_pass(drafting: SglangServer) -> None:
    limits = dataclasses.replace(LIMITS, end_ids=frozenset({3, 104}))
    (one,) = generate(drafting, [Prompt("end", (50, 100))], limits=limits)
    assert (one.output_ids, one.finish_reason) == ((101, 102, 103, 104), "stop")
    counts = read_counts(one.meta, draft_tokens=DRAFTS)
    assert counts == ServerCounts(tokens=3, passes=2, accepted=(0, 2))
