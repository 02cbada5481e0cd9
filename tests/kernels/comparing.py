"""Rows, judge and adamw: the form under test against the plain form in float64, case by case."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels import adamw as plain_adamw
from pipeline.kernels import judge as plain_judge
from pipeline.kernels import rows as plain_rows

MARGIN = 16


@dataclasses.dataclass(frozen=True)
class Side:
    """The form under test: its modules, where its tensors lie, its dtype."""

    norms: Any
    rows: Any
    judge: Any
    adamw: Any
    device: str
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        return 2e-5 if self.dtype == torch.float32 else 2e-2


PLAIN = Side(plain_rows, plain_rows, plain_judge, plain_adamw, "cpu", torch.float64)


@dataclasses.dataclass(frozen=True)
class Given:
    """A tensor of a case; strided: rows of a wider tensor, whose rest must stay as it is."""

    value: Tensor
    strided: bool = False
    wide: bool = False

    def on(self, side: Side) -> Tensor:
        value = self.value
        if value.dtype.is_floating_point:
            if value.dtype != torch.float64 or not self.wide:
                value = value.to(side.dtype)
            elif side is not PLAIN:
                value = value.float()
        if not self.strided:
            return value.to(side.device, copy=True)
        n, width = value.shape
        around = torch.full((n, width + 2 * MARGIN), 7.0, dtype=value.dtype)
        around[:, MARGIN : MARGIN + width] = value
        return around.to(side.device)[:, MARGIN : MARGIN + width]


def random(side: Side, *shape: int, strided: bool = False, spread: float = 1.0) -> Given:
    """Normal values that the side's dtype holds exactly."""
    return Given((torch.randn(*shape) * spread).to(side.dtype).double(), strided=strided)


def coarse(*shape: int, strided: bool = False) -> Given:
    """Eighths below 8: bfloat16 holds these and the sum of two of them exactly."""
    value = (torch.randn(*shape) * 8).round().clamp(-63, 63) / 8
    return Given(value.double(), strided=strided)


def wide(*shape: int) -> Given:
    """Normal float32 values, wide on every side."""
    return Given(torch.randn(*shape).double(), wide=True)


def agree(
    side: Side,
    call: Callable[..., None],
    given: dict[str, Given],
    outputs: Sequence[str],
    *,
    least: float = 0.0,
) -> None:
    """Calls both forms on the same values and compares the tensors named in `outputs`.

    least: the least tolerance, of each value and, times the largest, of all.
    """
    made: list[dict[str, Tensor]] = []
    for each in (PLAIN, side):
        tensors = {name: one.on(each) for name, one in given.items()}
        call(each, **tensors)
        made.append(tensors)
    for name in outputs:
        wanted, found = made[0][name], made[1][name].cpu().double()
        spread = float(wanted.abs().max()) if wanted.numel() else 1.0
        tolerance = side.tolerance * (0.02 if given[name].wide and side.tolerance > 1e-3 else 1)
        tolerance = max(tolerance, least)
        torch.testing.assert_close(
            found,
            wanted.double(),
            rtol=tolerance,
            atol=tolerance * max(spread, 1e-3),
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for name, one in given.items():
        if one.strided:
            around = made[1][name]._base
            assert around is not None
            edges = torch.cat([around[:, :MARGIN], around[:, -MARGIN:]])
            assert bool((edges == 7.0).all()), f"{name}: written beside its rows"


def index(n: int, below: int) -> Given:
    return Given(torch.randint(0, max(1, below), (n,)))


def norm(side: Side, n: int, width: int, *, indexed: bool, strided: bool) -> None:
    m = 2 * n + 1 if indexed else n
    given = {
        "x": random(side, m, width, strided=strided),
        "weight": random(side, width),
        "out": random(side, n, width, strided=strided),
        "scale": wide(n),
        "index": index(n, m),
    }

    def call(
        form: Side, x: Tensor, weight: Tensor, out: Tensor, scale: Tensor, index: Tensor
    ) -> None:
        taken = index if indexed else None
        form.norms.rms_norm(x, weight, eps=1e-5, out=out, scale=scale, index=taken)

    agree(side, call, given, ["out", "scale"])


def add_norm(side: Side, n: int, width: int, *, indexed: bool, in_place: bool) -> None:
    m = n + 3 if indexed else n
    given = {
        "x": coarse(n, width, strided=True),
        "residual": coarse(m, width),
        "weight": random(side, width),
        "total": random(side, n, width),
        "out": random(side, n, width, strided=True),
        "scale": wide(n),
        "index": index(n, m),
    }

    def call(form: Side, x: Tensor, residual: Tensor, weight: Tensor, **rest: Tensor) -> None:
        form.norms.add_rms_norm(
            x,
            residual,
            weight,
            eps=1e-5,
            total=x if in_place else rest["total"],
            out=rest["out"],
            scale=rest["scale"],
            index=rest["index"] if indexed else None,
        )

    agree(side, call, given, ["x", "out", "scale", "total"])


def norm_backward(
    side: Side, n: int, width: int, *, indexed: bool, at: bool, accumulate: bool, into: str = ""
) -> None:
    """into: "gradient" or "add", the argument that out is; "" for a tensor of its own."""
    m = n + 5
    given = {
        "gradient": random(side, n, width, strided=True),
        "x": random(side, m, width),
        "weight": random(side, width),
        "scale": Given(torch.rand(n).double() + 0.5, wide=True),
        "out": random(side, m, width, strided=True),
        "weight_gradient": wide(width),
        "index": index(n, m),
        "add": random(side, n, width),
        "at": Given(torch.randperm(m)[:n]),
    }

    def call(form: Side, out: Tensor, weight_gradient: Tensor, **rest: Tensor) -> None:
        form.norms.rms_norm_backward(
            rest["gradient"],
            rest["x"] if indexed else rest["x"][:n],
            rest["weight"],
            rest["scale"],
            out=rest[into] if into else out if at else out[:n],
            weight_gradient=weight_gradient,
            index=rest["index"] if indexed else None,
            add=rest["add"] if into != "gradient" else None,
            at=rest["at"] if at else None,
            accumulate=accumulate,
        )

    agree(side, call, given, ["out", "gradient", "add", "weight_gradient"])


def swiglu(side: Side, n: int, width: int) -> None:
    given = {
        "gate_up": random(side, n, 2 * width, strided=True),
        "out": random(side, n, width, strided=True),
    }

    def call(form: Side, gate_up: Tensor, out: Tensor) -> None:
        form.rows.swiglu(gate_up, out=out)

    agree(side, call, given, ["out"])


def swiglu_backward(side: Side, n: int, width: int) -> None:
    given = {
        "gate_up": random(side, n, 2 * width, strided=True),
        "gradient": random(side, n, width, strided=True),
    }

    def call(form: Side, gate_up: Tensor, gradient: Tensor) -> None:
        form.rows.swiglu_backward(gate_up, gradient)

    agree(side, call, given, ["gate_up", "gradient"])


def turn(side: Side, n: int, heads: int, rotated: int, d: int, *, back: str = "") -> None:
    """back: "" turns forward, "place" turns x back, "source" turns a float32 source back into x."""
    m, P, width = n + 2, 50, heads * d
    angle = torch.rand(P, d // 2, dtype=torch.float64) * 6
    given = {
        "x": random(side, n, width, strided=True),
        "source": wide(n, width) if back else random(side, m, width),
        "index": index(n, m),
        "position": index(n, P),
        "cos": Given(angle.cos(), wide=True),
        "sin": Given(angle.sin(), wide=True),
    }

    def call(form: Side, x: Tensor, source: Tensor, index: Tensor, **table: Tensor) -> None:
        where = (table["cos"], table["sin"], table["position"])
        if back:
            taken = source if back == "source" else None
            form.rows.rotate_back(x, *where, heads=heads, rotated=rotated, source=taken)
        else:
            form.rows.add_rotate(
                x, *where, source=source, index=index, heads=heads, rotated=rotated
            )

    agree(side, call, given, ["x"])


def gather(side: Side, n: int, width: int, count: int) -> None:
    m = n + 4
    given = {
        "source": random(side, m, width, strided=True),
        "sources": Given(torch.randint(-1, m, (count, n))),
        "out": random(side, n, width, strided=True),
    }

    def call(form: Side, source: Tensor, sources: Tensor, out: Tensor) -> None:
        form.rows.gather_sum(source, sources, out=out)

    agree(side, call, given, ["out"])


def judged(side: Side, asked: int, teachers: int, width: int, *, kind: str, learns: bool) -> None:
    """Labels are often the best entry, two equal best entries among them."""
    logits = random(side, asked, width, strided=True, spread=3)
    if asked:
        logits.value[0, width // 3] = logits.value[0, -1] = 14.0
    if asked > 1 and width > 4200:  # a block of 4096 apart: one lane meets both
        logits.value[1, 100] = logits.value[1, 4196] = 14.0
    best = logits.value.to(side.dtype).max(-1).indices
    label = torch.where(torch.arange(asked) % 3 == 2, torch.tensor(-1), best)
    given = {
        "logits": logits,
        "teacher": random(side, teachers, width, spread=3),
        "rows": index(asked, teachers),
        "label": Given(label),
        "weight": Given(torch.rand(asked).double(), wide=True),
        "step": Given(torch.arange(asked) * 4 // max(1, asked)),
    }
    totals = []

    def call(form: Side, **tensors: Tensor) -> None:
        sums = torch.ones(3, 5, dtype=torch.float64, device=form.device)
        form.judge.judge(*tensors.values(), sums=sums, kind=kind, learns=learns)
        totals.append(sums.cpu())

    # tv: where p and q are equal but for rounding, the slope's sign may be either's.
    agree(side, call, given, ["logits"], least=1e-3 if kind == "tv" else 0.0)
    torch.testing.assert_close(totals[1], totals[0], rtol=1e-5, atol=5e-4)
    assert torch.equal(totals[1][1], totals[0][1]), "hits"
    assert bool((totals[1][:, 4] == 1).all()), "a step without rows"


def updated(side: Side, n: int, *, factor: float, copied: bool) -> None:
    given = {
        "weight": Given(torch.randn(n)),
        "master": wide(n),
        "gradient": wide(n),
        "first": wide(n),
        "second": Given(torch.rand(n).double(), wide=True),
        "factor": Given(torch.tensor(factor).double(), wide=True),
    }

    def call(form: Side, weight: Tensor, master: Tensor, factor: Tensor, **rest: Tensor) -> None:
        form.adamw.adamw(
            weight if copied else master,
            master,
            *rest.values(),
            rate=1e-2,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            step=3,
            factor=factor,
        )

    agree(side, call, given, ["weight", "master", "gradient", "first", "second"])


Case = Callable[[Side], None]


def cases(rows: int, widths: Sequence[int], vocabulary: int) -> dict[str, Case]:
    """Every kernel at `rows` rows and each width, by name."""
    made: dict[str, Case] = {}
    for n in (rows, 1, 0):
        made[f"judge-kl-{n}"] = lambda s, n=n: judged(
            s, n, 1 + n // 3, vocabulary, kind="kl", learns=True
        )
        made[f"judge-tv-{n}"] = lambda s, n=n: judged(
            s, n, 1 + n // 3, vocabulary, kind="tv", learns=True
        )
        for w in widths:
            for name, case in _row_cases(n, w).items():
                made[f"{name}-{n}x{w}"] = case
        made[f"turn-{n}"] = lambda s, n=n: turn(s, n, 9, 7, 8)
        made[f"turn-wide-{n}"] = lambda s, n=n: turn(s, n, 21, 19, 128)
        made[f"turn-back-{n}"] = lambda s, n=n: turn(s, n, 5, 4, 12, back="place")
        made[f"turn-back-source-{n}"] = lambda s, n=n: turn(s, n, 5, 4, 64, back="source")
    made["judge-kl-looks"] = lambda s: judged(s, rows, 2, 40, kind="kl", learns=False)
    made["judge-tv-looks"] = lambda s: judged(s, rows, 2, 40, kind="tv", learns=False)
    for n in (3000, 1024, 1, 0):
        made[f"adamw-{n}"] = lambda s, n=n: updated(s, n, factor=0.25, copied=True)
        made[f"adamw-itself-{n}"] = lambda s, n=n: updated(s, n, factor=1.5, copied=False)
    made["adamw-infinite"] = lambda s: updated(s, 100, factor=float("inf"), copied=True)
    made["adamw-nan"] = lambda s: updated(s, 100, factor=float("nan"), copied=True)
    return made


def _row_cases(n: int, w: int) -> dict[str, Case]:
    return {
        "norm": lambda s: norm(s, n, w, indexed=False, strided=False),
        "norm-indexed": lambda s: norm(s, n, w, indexed=True, strided=True),
        "add-norm": lambda s: add_norm(s, n, w, indexed=False, in_place=True),
        "add-norm-indexed": lambda s: add_norm(s, n, w, indexed=True, in_place=False),
        "backward-alone": lambda s: norm_backward(
            s, n, w, indexed=False, at=False, accumulate=True
        ),
        "backward-in-gradient": lambda s: norm_backward(
            s, n, w, indexed=False, at=False, accumulate=False, into="gradient"
        ),
        "backward-in-add": lambda s: norm_backward(
            s, n, w, indexed=True, at=False, accumulate=False, into="add"
        ),
        "backward-at": lambda s: norm_backward(s, n, w, indexed=True, at=True, accumulate=False),
        "backward-at-more": lambda s: norm_backward(
            s, n, w, indexed=True, at=True, accumulate=True
        ),
        "swiglu": lambda s: swiglu(s, n, w),
        "swiglu-backward": lambda s: swiglu_backward(s, n, w),
        "gather": lambda s: gather(s, n, w, 4),
    }


SMALL = cases(45, (12, 600), 4500)
"""For the interpreter. 600: no power of two. 4500: more than one block of a row of logits."""
