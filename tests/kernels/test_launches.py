"""What launchers ask Triton for: nothing that is not compiled ahead, nothing new for a new size."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pipeline.kernels.cuda import adamw, ahead, judge, norms, rows
from pipeline.kernels.cuda.blocks import HOPPER

Wanted = tuple[Any, ...]

KIMI = ahead.SHAPES["kimi"]


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> set[Wanted]:
    """Fills with what is asked of Triton's compiler, which then neither compiles nor launches."""
    found: set[Wanted] = set()

    def note(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any,
        attributes: Any, warmup: bool,
    ) -> None:  # fmt: skip
        found.add(
            described(self, signature, constants, attributes, options.num_warps, options.num_stages)
        )

    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )
    monkeypatch.setattr(JITFunction, "_do_compile", note)
    monkeypatch.setattr(driver, "_active", device)
    return found


def described(
    kernel: Any, signature: dict[str, str], constants: Any, attributes: Any, warps: int, stages: int
) -> Wanted:
    aligned = sorted(str(place) for place, listed in attributes.items() if listed)
    fixed = sorted((str(place), str(value)) for place, value in constants.items())
    name = kernel.fn.__name__
    return (name, tuple(sorted(signature.items())), tuple(fixed), tuple(aligned), warps, stages)


def ahead_of_time(*modules: str) -> set[Wanted]:
    found = set()
    for module in modules:
        for launch in ahead.launches(module, "kimi", HOPPER):
            made, tuning = ahead.source(launch), launch.tuning
            parts = (launch.kernel, made.signature, made.constants, made.attrs)
            found.add(described(*parts, tuning.num_warps, tuning.num_stages))
    return found


def room(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def numbers(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int64)


def test_norms_are_compiled_ahead_as_launched(wanted: set[Wanted]) -> None:
    x, weight, scale, at = room(3, KIMI.hidden), room(KIMI.hidden), torch.empty(3), numbers(3)
    for index in (None, at):
        norms.rms_norm(x, weight, eps=1e-5, out=x, scale=scale, index=index)
        norms.add_rms_norm(x, x, weight, eps=1e-5, total=x, out=x, scale=scale, index=index)
    total = torch.empty(KIMI.hidden)
    for index, add, to, more in (
        (None, None, None, False), (None, x, None, False), (at, None, at, False),
        (at, None, at, True), (at, x, at, True),
    ):  # fmt: skip
        norms.rms_norm_backward(
            x, x, weight, scale, out=x, weight_gradient=total,
            index=index, add=add, at=to, accumulate=more,
        )  # fmt: skip
    assert wanted == ahead_of_time("norms")


def test_rows_are_compiled_ahead_as_launched(wanted: set[Wanted]) -> None:
    gate_up, at = room(3, 2 * KIMI.intermediate), numbers(3)
    rows.swiglu(gate_up, out=gate_up[:, : KIMI.intermediate])
    rows.swiglu_backward(gate_up, room(3, KIMI.intermediate))
    table = torch.empty(9, KIMI.head_dim // 2)
    for heads, rotated in ((KIMI.heads, KIMI.heads), (2 * KIMI.kv, KIMI.kv)):
        x = room(3, heads * KIMI.head_dim)
        turn = {"heads": heads, "rotated": rotated}
        rows.add_rotate(x, table, table, at, source=x, index=at, **turn)
        source = None if heads == rotated else x.float()
        rows.rotate_back(x, table, table, at, source=source, **turn)
        rows.gather_sum(x, numbers(15).reshape(5, 3), out=x)
    assert wanted == ahead_of_time("rows")


def test_the_loss_and_the_update_are_compiled_ahead_as_launched(wanted: set[Wanted]) -> None:
    for kind in ("kl", "tv"):
        for learns in (True, False):
            judged(3, 0, KIMI.vocabulary, kind=kind, learns=learns)
    weights = [torch.empty(64) for _ in range(4)]
    updated(weights[0], *weights, step=1)
    updated(room(64), *weights, step=1)
    assert wanted == ahead_of_time("judge", "adamw")


def judged(n: int, first: int, width: int, *, kind: str = "kl", learns: bool = True) -> None:
    at, weight = numbers(n + first)[first:], torch.empty(n + first)[first:]
    judge.judge(
        room(n, width), room(n, width), at, at, weight, at,
        sums=torch.empty(3, 5, dtype=torch.float64), kind=kind, learns=learns,
    )  # fmt: skip


def updated(*tensors: Tensor, step: int) -> None:
    adamw.adamw(
        *tensors, rate=1.0 / step, betas=(0.9, 0.95), eps=1e-8, weight_decay=1.0 - 1.0 / step,
        step=step, factor=torch.ones(()),
    )  # fmt: skip


def normed(n: int, first: int) -> None:
    x, at = room(n, 96), numbers(n + first)[first:]
    weight, scale = room(96), torch.empty(n + first)[first:]
    norms.rms_norm(x, weight, eps=1e-5, out=x, scale=scale, index=at)
    norms.rms_norm_backward(
        x, x, weight, scale, out=x, weight_gradient=torch.empty(96),
        index=at, add=x, at=at, accumulate=True,
    )  # fmt: skip


def turned(n: int, first: int) -> None:
    x, at, table = room(n, 96), numbers(n + first)[first:], torch.empty(n, 16)
    rows.add_rotate(x, table, table, at, source=x, index=at, heads=3, rotated=2)
    rows.rotate_back(x, table, table, at, source=x.float(), heads=3, rotated=2)
    rows.gather_sum(x, numbers(2 * (n + first)).reshape(2, -1)[:, first:], out=x)


@pytest.mark.parametrize(
    "work",
    [
        normed,
        turned,
        lambda n, first: judged(n, first, 96),
        lambda n, _: updated(*(torch.empty(64) for _ in range(5)), step=n),
    ],
    ids=["norms", "rows", "judge", "adamw"],
)
def test_a_pack_of_another_size_compiles_nothing_anew(
    work: Callable[[int, int], None], wanted: set[Wanted]
) -> None:
    """Row counts of every divisibility, one row among them, and slices that begin anywhere."""
    work(48, 0)
    before = set(wanted)
    assert before
    for n, first in ((1, 0), (2, 1), (17, 3), (32, 16), (4096, 1)):
        work(n, first)
    assert wanted == before
