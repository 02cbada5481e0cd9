"""Attention's Triton form on a GPU: against one dense softmax in float64, and its promises."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.attention_chain import Chain, Result, assert_near, computed, dense, make_chain

pytestmark = pytest.mark.gpu

KIMI = {"groups": 7, "kv": 8, "d": 128}
SHARES = (0.3, 0.3, 0.29, 0.2, 0.01)


def by_group(chain: Chain, found: Result) -> Iterator[tuple[Chain, Result]]:
    """Heads that share keys, as chains of their own: a dense softmax of all would fill the GPU."""
    d = chain.keys.shape[1] // (2 * chain.kv)
    groups = chain.heads // chain.kv
    for g in range(chain.kv):
        heads, key = slice(g * groups, (g + 1) * groups), slice(g * d, (g + 1) * d)
        wide = slice(heads.start * d, heads.stop * d)

        def pair(x: torch.Tensor, key: slice = key) -> torch.Tensor:
            return x.unflatten(1, (2, -1))[:, :, key].flatten(1)

        steps = tuple(
            dataclasses.replace(
                step,
                query=step.query[:, wide].contiguous(),
                gradient=step.gradient[:, wide].contiguous(),
            )
            for step in chain.steps
        )
        yield (
            Chain(pair(chain.keys), pair(chain.own), steps, 1, groups),
            Result(
                found.out[:, wide], found.lse[:, heads], found.d_query[:, wide],
                pair(found.d_keys), pair(found.d_own),
            ),
        )  # fmt: skip


BFLOAT, FLOAT = (torch.bfloat16, 1e-2), (torch.float32, 1e-5)


@pytest.mark.parametrize(
    ("documents", "live", "sizes", "kind"),
    [
        pytest.param([1024] * 4, SHARES, KIMI, BFLOAT, id="four documents"),
        pytest.param([37 + 3 * n for n in range(40)], SHARES, KIMI, BFLOAT, id="forty documents"),
        pytest.param([1], (1.0,) * 8, KIMI, BFLOAT, id="one row"),
        pytest.param([4099], (0.9, 0.5), {"groups": 4, "d": 64}, FLOAT, id="float32"),
        pytest.param([700, 1, 333], (1.0,) * 3, {"groups": 1, "d": 16}, BFLOAT, id="narrow heads"),
        pytest.param([600, 500], (0.7, 0.5), {"groups": 2, "d": 96}, BFLOAT, id="padded heads"),
    ],
)
def test_it_is_a_dense_softmax(documents, live, sizes, kind):
    dtype, relative = kind
    chain = make_chain(documents, live, **sizes, dtype=dtype, device="cuda")
    for part, found in by_group(chain, computed(chain)):
        assert_near(found, dense(part), relative=relative)


def test_no_rows_leave_gradients_of_zero():
    chain = make_chain([300], (-1.0, -1.0), **KIMI, dtype=torch.bfloat16, device="cuda")
    found = computed(chain)
    assert found.d_keys.shape[0] == 300
    assert not found.d_keys.any()


def test_the_same_input_gives_the_same_bits():
    chain = make_chain([500, 700], SHARES, **KIMI, dtype=torch.bfloat16, device="cuda")
    for one, other in zip(computed(chain), computed(chain), strict=True):
        assert torch.equal(one, other)


def test_packs_of_other_sizes_compile_nothing_anew(monkeypatch):
    from triton import knobs

    compiled = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["repr"])
    )
    sizes = {"groups": 3, "kv": 2, "d": 16, "dtype": torch.bfloat16, "device": "cuda"}
    computed(make_chain([64, 64], (1.0, 0.5), **sizes))
    assert compiled
    compiled.clear()
    for documents in ([1], [16], [17, 3], [255, 1], [512] * 3):
        for live in ((1.0,), (0.9, 0.5, 0.3), (1.0,) * 5):
            computed(make_chain(documents, live, **sizes))
    assert not compiled
