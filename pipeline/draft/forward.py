"""The drafter's steps over the stack of live rows, keeping what backward reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.draft.chain import ChainPlan
from pipeline.draft.config import DrafterConfig
from pipeline.draft.products import product
from pipeline.draft.rotary import rotary_rows
from pipeline.draft.weights import FINAL_NORM, HIDDEN_NORM, INPUT_NORM, POST_NORM, Weights
from pipeline.kernels.attention import attend
from pipeline.kernels.rows import add_rms_norm, add_rotate, rms_norm, swiglu


@dataclass(frozen=True, eq=False)
class States:
    """All of a pack's forward. M stack places, R0 of them of step 0, M1 = M - R0; N keys.

    Q query width, W twice the width of keys; scales [*] are the norms' 1 / rms, wide.

    cos, sin [positions, d / 2], wide. embeds, embeds_normed [tokens, H]; embeds_scale.
    fused [N, H]: first hidden states; fused_scale. normed [M + N, H]: what is projected, of the
    stack, then of the keys. key_values [M1 + N, W]: of the stack from step 1 on, then of the keys.
    query, attended [M, Q]; lse [M, heads], wide. middle [M, H]: after attention; middle_scale,
    middle_normed [M, H]. gate_up [M, 2I].
    output [M, H]: of the layer. hidden [M, H] (only with norm_output): what a step got, with
    hidden_scale of the final norm that made it. normed_scale [M1]: of steps from 1 on.
    """

    cos: Tensor
    sin: Tensor
    embeds: Tensor
    embeds_normed: Tensor
    embeds_scale: Tensor
    fused: Tensor
    fused_scale: Tensor
    normed: Tensor
    normed_scale: Tensor
    key_values: Tensor
    query: Tensor
    attended: Tensor
    lse: Tensor
    middle: Tensor
    middle_scale: Tensor
    middle_normed: Tensor
    gate_up: Tensor
    output: Tensor
    hidden: Tensor | None
    hidden_scale: Tensor


def forward(
    weights: Weights,
    config: DrafterConfig,
    plan: ChainPlan,
    *,
    ids: Tensor,
    taps: Tensor,
    embedding: Tensor,
) -> States:
    """Layer outputs of all live (row, step) pairs. ids [T], taps [N, 3 * Ht], embedding [V, H]."""
    dtype, device = weights.head.dtype, weights.head.device
    wide = torch.promote_types(dtype, torch.float32)
    H, Q, W, eps = config.hidden_size, config.query_width, 2 * config.kv_width, config.rms_norm_eps
    M, N = plan.stack, len(plan.keys)
    R0 = plan.steps[0][1]
    by_embed, by_hidden = weights.qkv[:, :H], weights.qkv[:, H:]

    def room(rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=dtype, device=device)

    def scales(rows: int) -> Tensor:
        return torch.empty(rows, dtype=wide, device=device)

    cos, sin = rotary_rows(config, plan.positions, dtype=wide, device=device)
    embeds = embedding[ids[plan.tokens]].to(dtype)
    s = States(
        cos=cos, sin=sin,
        embeds=embeds, embeds_normed=torch.empty_like(embeds), embeds_scale=scales(len(embeds)),
        fused=taps @ weights.fc.T, fused_scale=scales(N),
        normed=room(M + N, H), normed_scale=scales(M - R0),
        key_values=room(M - R0 + N, W), query=room(M, Q), attended=room(M, Q),
        lse=torch.empty(M, config.heads, dtype=wide, device=device),
        middle=room(M, H), middle_scale=scales(M), middle_normed=room(M, H),
        gate_up=room(M, 2 * config.intermediate_size),
        output=room(M, H),
        hidden=room(M, H) if config.norm_output else None,
        hidden_scale=scales(M if config.norm_output else 0),
    )  # fmt: skip
    rms_norm(embeds, weights.norms[INPUT_NORM], eps=eps, out=s.embeds_normed, scale=s.embeds_scale)
    # The embedding half of (row, step k) is that of token row + 1 + k: projected once, read often.
    embed_query = s.embeds_normed[plan.query_at] @ by_embed[:Q].T
    embed_key = s.embeds_normed @ by_embed[Q:].T

    rms_norm(s.fused, weights.norms[HIDDEN_NORM], eps=eps, out=s.normed[M:], scale=s.fused_scale)
    keys = s.key_values[M - R0 :]
    product(s.normed[M:], by_hidden[Q:].T, out=keys)
    pair = {"heads": 2 * config.kv_heads, "rotated": config.kv_heads}
    add_rotate(keys, cos, sin, plan.key_position, source=embed_key, index=plan.key_token, **pair)
    torch.index_select(s.normed[M:], 0, plan.at_keys, out=s.normed[:R0])

    inner = room(R0, config.intermediate_size)  # a step's; no later one has more rows
    for k, (first, last) in enumerate(plan.steps):
        rows = slice(first, last)
        own_rows = slice(first - R0, last - R0)  # of step 1 and later
        residual: Tensor = s.fused
        index: Tensor | None = plan.at_keys
        if k:
            residual, index = s.output, plan.previous[own_rows]
            if s.hidden is not None:
                rms_norm(
                    s.output, weights.norms[FINAL_NORM], eps=eps, index=index,
                    out=s.hidden[rows], scale=s.hidden_scale[rows],
                )  # fmt: skip
                residual, index = s.hidden[rows], None
            rms_norm(
                residual, weights.norms[HIDDEN_NORM], eps=eps, index=index,
                out=s.normed[rows], scale=s.normed_scale[own_rows],
            )  # fmt: skip
            own = s.key_values[own_rows]
            product(s.normed[rows], by_hidden[Q:].T, out=own)
            position, token = plan.position[rows], plan.own_token[own_rows]
            add_rotate(own, cos, sin, position, source=embed_key, index=token, **pair)
        product(s.normed[rows], by_hidden[:Q].T, out=s.query[rows])
        add_rotate(
            s.query[rows], cos, sin, plan.position[rows],
            source=embed_query, index=plan.query_token[rows],
            heads=config.heads, rotated=config.heads,
        )  # fmt: skip
        attend(
            s.query[rows], keys, s.key_values[: M - R0], plan.own(k),
            plan.start[rows], plan.limit[rows],
            kv=config.kv_heads, spans=plan.spans(k) if device.type == "cpu" else (),
            out=s.attended[rows], lse=s.lse[rows],
        )  # fmt: skip
        product(s.attended[rows], weights.o.T, out=s.middle[rows])
        add_rms_norm(
            s.middle[rows], residual, weights.norms[POST_NORM], eps=eps, index=index,
            total=s.middle[rows], out=s.middle_normed[rows], scale=s.middle_scale[rows],
        )  # fmt: skip
        product(s.middle_normed[rows], weights.gate_up.T, out=s.gate_up[rows])
        swiglu(s.gate_up[rows], out=inner[: last - first])
        torch.addmm(s.middle[rows], inner[: last - first], weights.down.T, out=s.output[rows])
    return s
