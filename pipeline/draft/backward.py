"""The gradient of the loss by all weights, from the stacks that forward left.

Steps are walked from the last to the first, as each gives to the one before it; the weights'
gradients are then one product each over as many steps as a group holds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.draft.chain import ChainPlan
from pipeline.draft.config import DrafterConfig
from pipeline.draft.forward import States
from pipeline.draft.products import add_product, product
from pipeline.draft.weights import FINAL_NORM, HIDDEN_NORM, INPUT_NORM, POST_NORM, Weights
from pipeline.kernels.attention import attend_backward, attend_backward_keys
from pipeline.kernels.rows import gather_sum, rms_norm_backward, rotate_back, swiglu_backward

GROUP_ROWS = 24576
"""Stack places whose slopes are kept for one product. More rows make a product no faster, and take
39 KB each at a Kimi-like drafter's widths."""


def backward(
    weights: Weights,
    config: DrafterConfig,
    plan: ChainPlan,
    states: States,
    *,
    taps: Tensor,
    slopes: Tensor,
    gradients: Weights,
    fresh: bool,
    finished: Callable[[str], None],
) -> None:
    """Adds the gradients of all but the head (writes them when `fresh`; norms are always added to).

    slopes [M, H]: of the loss by the layer's outputs, as the head leaves them; overwritten. So are
    parts of `states`. finished is told down, gate_up, o, qkv, fc, norms.
    """
    work = _Backward(weights, config, plan, states, slopes, gradients)
    for number, group in enumerate(_groups(plan)):
        d_residual = work.layer(group, fresh=fresh and number == 0)
    for bucket in ("down", "gate_up", "o"):
        finished(bucket)
    d_fused = work.first_states(d_residual)
    work.projections(fresh=fresh)
    finished("qkv")
    add_product(gradients.fc, d_fused.T, taps, fresh=fresh)
    finished("fc")
    finished("norms")


def _groups(plan: ChainPlan) -> list[range]:
    """Steps in groups of at most GROUP_ROWS places (or one step), the last group first."""
    groups: list[range] = []
    end = len(plan.steps)
    while end > 0:
        first = end - 1
        while first > 0 and plan.steps[end - 1][1] - plan.steps[first - 1][0] <= GROUP_ROWS:
            first -= 1
        groups.append(range(first, end))
        end = first
    return groups


class _Backward:
    """One pack's backward. R0 stack places are of step 0, M1 of later ones; widths as in States.

    d_query [M, Q] and d_key_values [M1 + N, W]: turned back. d_normed [R0, H]: by the normed state
    that step 0's query reads, once `layer` has come to it.
    """

    def __init__(
        self,
        weights: Weights,
        config: DrafterConfig,
        plan: ChainPlan,
        states: States,
        slopes: Tensor,
        gradients: Weights,
    ) -> None:
        self.weights, self.config, self.plan, self.s = weights, config, plan, states
        self.slopes, self.gradients, self.norms = slopes, gradients, gradients.norms
        self.by_hidden = weights.qkv[:, config.hidden_size :]
        self.R0, self.M1 = plan.steps[0][1], plan.stack - plan.steps[0][1]
        s, wide = states, states.lse.dtype
        self.keys, self.own = s.key_values[self.M1 :], s.key_values[: self.M1]
        # A step's outputs are read last by the step after it, its middle states before its query's
        # gradient is made: their memory serves again.
        self.d_attended = _again(s.output, config.query_width)
        self.d_query = _again(s.middle, config.query_width)
        self.delta = torch.empty_like(s.lse)
        self.d_key_values = torch.empty_like(s.key_values)
        self.d_own = torch.zeros(self.own.shape, dtype=wide, device=slopes.device)
        self.d_keys = torch.zeros(self.keys.shape, dtype=wide, device=slopes.device)
        self.d_normed = slopes
        self.pair = {"heads": 2 * config.kv_heads, "rotated": config.kv_heads}

    def layer(self, group: range, *, fresh: bool) -> Tensor:
        """Steps of a group, last first, then its part of down, gate_up and o.

        Gives [R, H]: the slope by the residual that the group's first step got.
        """
        s, slopes = self.s, self.slopes
        begin, end = self.plan.steps[group[0]][0], self.plan.steps[group[-1]][1]
        inner = slopes.new_empty(end - begin, self.config.intermediate_size)
        d_middle = slopes.new_empty(end - begin, self.config.hidden_size)
        for k in reversed(group):
            first, last = self.plan.steps[k]
            part = slice(first - begin, last - begin)
            self._step(k, slice(first, last), inner=inner[part], d_middle=d_middle[part])
        rows = slice(begin, end)
        for total, slope, given in (
            (self.gradients.down, slopes[rows], inner),
            (self.gradients.gate_up, s.gate_up[rows], s.middle_normed[rows]),
            (self.gradients.o, d_middle, s.attended[rows]),
        ):
            add_product(total, slope.T, given, fresh=fresh)
        return d_middle[: self.plan.steps[group[0]][1] - begin]

    def _step(self, k: int, rows: slice, *, inner: Tensor, d_middle: Tensor) -> None:
        """One step; inner [R, I] becomes the gated unit's output, d_middle [R, H] its residual's.

        What the step before gave is added to its slopes.
        """
        s, plan, config, slopes = self.s, self.plan, self.config, self.slopes
        norms = self.weights.norms
        product(slopes[rows], self.weights.down, out=inner)
        swiglu_backward(s.gate_up[rows], inner)
        rms_norm_backward(
            s.gate_up[rows] @ self.weights.gate_up, s.middle[rows], norms[POST_NORM],
            s.middle_scale[rows], add=slopes[rows],
            out=d_middle, weight_gradient=self.norms[POST_NORM],
        )  # fmt: skip
        product(d_middle, self.weights.o, out=self.d_attended[rows])
        attend_backward(
            self.d_attended[rows], s.query[rows], self.keys, self.own, plan.own(k),
            plan.start[rows], plan.limit[rows], s.attended[rows], s.lse[rows],
            kv=config.kv_heads, spans=() if slopes.is_cuda else plan.spans(k),
            delta=self.delta[rows], d_query=self.d_query[rows],
            d_own=self.d_own, d_keys=self.d_keys,
        )  # fmt: skip
        rotate_back(
            self.d_query[rows], s.cos, s.sin, plan.position[rows],
            heads=config.heads, rotated=config.heads,
        )  # fmt: skip
        d_normed = self.d_query[rows] @ self.by_hidden[: config.query_width]
        if k == 0:
            self.d_normed = d_normed
            return
        own_rows = slice(rows.start - self.R0, rows.stop - self.R0)
        d_own = self.d_key_values[own_rows]
        rotate_back(
            d_own, s.cos, s.sin, plan.position[rows], source=self.d_own[own_rows], **self.pair
        )
        d_normed.addmm_(d_own, self.by_hidden[config.query_width :])
        before, scale = plan.previous[own_rows], s.normed_scale[own_rows]
        if s.hidden is None:
            rms_norm_backward(
                d_normed, s.output, norms[HIDDEN_NORM], scale,
                index=before, add=d_middle, at=before, accumulate=True,
                out=slopes, weight_gradient=self.norms[HIDDEN_NORM],
            )  # fmt: skip
            return
        rms_norm_backward(
            d_normed, s.hidden[rows], norms[HIDDEN_NORM], scale,
            add=d_middle, out=d_normed, weight_gradient=self.norms[HIDDEN_NORM],
        )  # fmt: skip
        rms_norm_backward(
            d_normed, s.output, norms[FINAL_NORM], s.hidden_scale[rows],
            index=before, at=before, accumulate=True,
            out=slopes, weight_gradient=self.norms[FINAL_NORM],
        )  # fmt: skip

    def first_states(self, d_residual: Tensor) -> Tensor:
        """The slope by the first hidden states [N, H]; d_residual [R0, H]: by those of step 0."""
        s, plan, M1 = self.s, self.plan, self.M1
        attend_backward_keys(
            self.d_attended, s.query, self.keys, s.lse, self.delta, plan.start, plan.limit,
            plan.steps, kv=self.config.kv_heads, d_keys=self.d_keys,
        )  # fmt: skip
        d_keys = self.d_key_values[M1:]
        rotate_back(d_keys, s.cos, s.sin, plan.key_position, source=self.d_keys, **self.pair)
        d_fused = d_keys @ self.by_hidden[self.config.query_width :]
        d_fused.index_add_(0, plan.at_keys, self.d_normed)
        rms_norm_backward(
            d_fused, s.fused, self.weights.norms[HIDDEN_NORM], s.fused_scale,
            out=d_fused, weight_gradient=self.norms[HIDDEN_NORM],
        )  # fmt: skip
        return d_fused.index_add_(0, plan.at_keys, d_residual)

    def projections(self, *, fresh: bool) -> None:
        """Gradients of query, key and value projections, and of the norm of the embeddings."""
        s, plan, into = self.s, self.plan, self.gradients.qkv
        H, Q = self.config.hidden_size, self.config.query_width
        by_embed = self.weights.qkv[:, :H]
        add_product(into[:Q, H:], self.d_query.T, s.normed[: plan.stack], fresh=fresh)
        add_product(into[Q:, H:], self.d_key_values.T, s.normed[self.R0 :], fresh=fresh)
        d_query = self.slopes.new_empty(len(plan.query_at), Q)
        gather_sum(self.d_query, plan.query_sources, out=d_query)
        d_pair = self.slopes.new_empty(len(plan.tokens), self.d_key_values.shape[1])
        gather_sum(self.d_key_values, plan.key_sources, out=d_pair)
        add_product(into[:Q, :H], d_query.T, s.embeds_normed[plan.query_at], fresh=fresh)
        add_product(into[Q:, :H], d_pair.T, s.embeds_normed, fresh=fresh)
        # The embedding is frozen; only its norm's weight learns.
        d_embeds = d_pair @ by_embed[Q:]
        d_embeds.index_add_(0, plan.query_at, d_query @ by_embed[:Q])
        rms_norm_backward(
            d_embeds, s.embeds, self.weights.norms[INPUT_NORM], s.embeds_scale,
            out=d_embeds, weight_gradient=self.norms[INPUT_NORM],
        )  # fmt: skip


def _again(stack: Tensor, width: int) -> Tensor:
    """Room [M, width]: the stack's own memory when it is as wide."""
    return stack if stack.shape[1] == width else stack.new_empty(len(stack), width)
