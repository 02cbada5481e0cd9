import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from pipeline.evaluation.errors import UnsupportedTarget, WrongDrafter
from pipeline.evaluation.passes import TargetPasses, recording
from tests.evaluation.make import tiny_target

IDS = [3, 17, 5, 40, 11, 2]


def test_tap_k_is_the_state_that_enters_layer_k() -> None:
    target = tiny_target(dtype=torch.float64)
    states = target(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    with recording(target, (0, 2, 4)) as taps:
        TargetPasses(target).run(IDS, last=1)
    torch.testing.assert_close(taps.latest(), torch.cat([states[k][0] for k in (0, 2, 4)], -1))


def test_the_tap_after_the_last_layer_is_taken_before_the_final_norm() -> None:
    target = tiny_target(dtype=torch.float64)
    with torch.no_grad():
        target.model.norm.weight.copy_(torch.linspace(0.2, 3.0, target.config.hidden_size))
    with recording(target, (1, 2, 5)) as taps:
        logits = TargetPasses(target).run(IDS, last=1)
    last = taps.latest()[-1:, -target.config.hidden_size :]
    torch.testing.assert_close(target.lm_head(target.model.norm(last)), logits)


def test_hooks_are_gone_afterwards() -> None:
    target = tiny_target(dtype=torch.float32)
    with recording(target, (1, 2, 5)):
        pass
    assert not any(module._forward_pre_hooks for module in target.modules())


def test_taking_back_tokens_gives_the_logits_of_never_having_run_them() -> None:
    target = tiny_target(dtype=torch.float64)
    passes = TargetPasses(target)
    passes.run(IDS, last=1)
    passes.run([9, 8, 7], last=3)
    passes.keep(len(IDS) + 1)
    again = passes.run([30, 31], last=2)
    straight = TargetPasses(target).run([*IDS, 9, 30, 31], last=2)
    torch.testing.assert_close(again, straight)


def test_a_tap_beyond_the_target_is_refused() -> None:
    with (
        pytest.raises(WrongDrafter, match="5 layers"),
        recording(tiny_target(dtype=torch.float32), (1, 2, 6)),
    ):
        pass


def test_a_cache_that_cannot_be_cut_back_is_refused() -> None:
    config = MistralConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
    )
    with pytest.raises(UnsupportedTarget, match="SlidingWindow"):
        TargetPasses(MistralForCausalLM(config))
