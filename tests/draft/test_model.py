import pytest
import torch

from pipeline.draft.errors import ConfigError
from pipeline.draft.model import Drafter
from pipeline.draft.rotary import rotate
from tests.draft.make import make_config, make_drafter, make_rows
from tests.draft.reference import rms


def test_the_same_seed_gives_the_same_bits():
    config, head = make_config(), torch.ones(7, 12)
    one, other, third = (
        Drafter.initialised(config, head_rows=head, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["fc.weight"], third["fc.weight"])


def test_the_head_starts_as_the_targets_rows():
    head = torch.arange(84.0).view(7, 12)
    model = Drafter.initialised(make_config(), head_rows=head, seed=0)
    assert torch.equal(model.lm_head.weight, head)
    assert bool((model.norm.weight == 1).all())


def test_head_rows_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"\[8, 12\]"):
        Drafter.initialised(make_config(), head_rows=torch.ones(8, 12), seed=0)


@pytest.mark.parametrize("norm_output", [False, True])
def test_serving_methods_give_the_recursion_of_one_row(norm_output):
    # Two steps of a one-row document by the serving methods (B15) against the formulas by hand.
    config = make_config(norm_output=norm_output)
    model = make_drafter(config)
    pack, embedding, _, _ = make_rows(config, [4], [True] * 4)
    w = dict(model.named_parameters())
    value = lambda hidden, token: torch.cat(  # noqa: E731
        [rms(embedding[token], w["midlayer.input_layernorm.weight"], 1e-5),
         rms(hidden, w["midlayer.hidden_norm.weight"], 1e-5)]
    ) @ w["midlayer.self_attn.v_proj.weight"].T  # fmt: skip

    hidden = model.fuse(pack.taps[:1])
    q, k, v = model.qkv(hidden, embedding[pack.ids[1:2]])
    # A single key: the softmax is one and the output is the value, whatever the query.
    assert q.shape == (1, 4, 4)
    assert rotate(k, model.rotary(torch.tensor([0]))).shape == (1, 2, 4)
    wanted = value(pack.taps[0] @ w["fc.weight"].T, pack.ids[1])
    torch.testing.assert_close(v.flatten(), wanted)
    output = model.finish(hidden, v.repeat_interleave(2, 1))
    middle = (
        hidden
        + wanted.view(2, 4).repeat_interleave(2, 0).flatten()
        @ w["midlayer.self_attn.o_proj.weight"].T
    )
    y = rms(middle, w["midlayer.post_attention_layernorm.weight"], 1e-5)
    gate, up = (y @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    inner = (gate * gate.sigmoid() * up) @ w["midlayer.mlp.down_proj.weight"].T
    torch.testing.assert_close(output, middle + inner)
    normed = rms(output, w["norm.weight"], 1e-5)
    torch.testing.assert_close(model.recurrent(output), normed if norm_output else output)
    torch.testing.assert_close(model.logits(output), normed @ w["lm_head.weight"].T)
