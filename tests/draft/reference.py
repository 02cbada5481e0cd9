"""The drafter's loss as eagle3.md states it, in the plainest dense form: every row, every step.

Written from the formulas and not from pipeline/draft: weights are read by their export names only.
Float64 on the CPU. Slow and quadratic on purpose.
"""

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """x [R, heads, d] as complex pairs (i, i + d/2), turned by position * theta^(-2i/d)."""
    d = x.shape[-1]
    rate = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = position[:, None, None].double() * rate
    pairs = torch.complex(x[..., : d // 2], x[..., d // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def dense_loss(
    weights: dict[str, Tensor],
    config,
    *,
    ids: Tensor,
    taps: Tensor,
    final: Tensor,
    supervised: Tensor,
    document: Tensor,
    position: Tensor,
    embedding: Tensor,
    teacher_head: Tensor,
    target_ids: Tensor,
    steps: int,
    decay: float,
    kind: str = "kl",
) -> tuple[Tensor, float, dict[str, list[float]]]:
    """Weighted loss sum with its graph, weight sum, and metric sums by step."""
    T = ids.shape[0]
    h, kv, d = config.heads, config.kv_heads, config.head_dim
    layer = "midlayer."
    at = torch.arange(T)
    hidden = taps @ weights["fc.weight"].T
    keys, values = [], []
    loss, total = hidden.sum() * 0, 0.0
    metrics: dict[str, list[float]] = {
        name: [] for name in ("count", "correct", "overlap", "outside", "loss")
    }
    see = (at[None] <= at[:, None]) & (document[None] == document[:, None])
    for k in range(steps):
        token = ids[(at + 1 + k).clamp(max=T - 1)]  # past the pack: never supervised, any token
        x = torch.cat(
            [
                rms(
                    embedding[token], weights[layer + "input_layernorm.weight"], config.rms_norm_eps
                ),
                rms(hidden, weights[layer + "hidden_norm.weight"], config.rms_norm_eps),
            ],
            -1,
        )
        project = lambda name: x @ weights[f"{layer}self_attn.{name}_proj.weight"].T  # noqa: B023, E731
        q = turn(project("q").view(T, h, d), position + k, config.rope_theta)
        keys.append(turn(project("k").view(T, kv, d), position + k, config.rope_theta))
        values.append(project("v").view(T, kv, d))
        spread = lambda t: t.repeat_interleave(h // kv, 1)  # noqa: E731
        scores = torch.einsum("rhd,chd->hrc", q, spread(keys[0])) / d**0.5
        scores = scores.masked_fill(~see, float("-inf"))
        own = [(q * spread(key)).sum(-1).T[..., None] / d**0.5 for key in keys[1:]]
        share = torch.softmax(torch.cat([scores, *own], -1), -1)
        mixed = torch.einsum("hrc,chd->rhd", share[..., :T], spread(values[0]))
        for j, value in enumerate(values[1:]):
            mixed = mixed + share[..., T + j].T[..., None] * spread(value)
        middle = hidden + mixed.reshape(T, -1) @ weights[layer + "self_attn.o_proj.weight"].T
        y = rms(middle, weights[layer + "post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = y @ weights[layer + "mlp.gate_proj.weight"].T
        up = y @ weights[layer + "mlp.up_proj.weight"].T
        down = (gate * torch.sigmoid(gate) * up) @ weights[layer + "mlp.down_proj.weight"].T
        output = middle + down
        normed = rms(output, weights["norm.weight"], config.rms_norm_eps)
        hidden = normed if config.norm_output else output

        log_q = torch.log_softmax(normed @ weights["lm_head.weight"].T, -1)
        sums = dict.fromkeys(metrics, 0.0)
        for t in range(T - 2 - k):
            if not supervised[t + 2 + k] or document[t + 2 + k] != document[t]:
                continue
            p = torch.softmax(teacher_head @ final[t + 1 + k], -1)
            q_t = log_q[t].exp()
            overlap = torch.minimum(p, q_t).sum()
            one = -(p * log_q[t]).sum() if kind == "kl" else 1 - overlap
            loss = loss + decay**k * one
            total += decay**k
            label = int(ids[t + 2 + k])
            sums["count"] += 1
            sums["correct"] += int(target_ids[int(log_q[t].argmax())]) == label
            sums["overlap"] += float(overlap.detach())
            sums["outside"] += label not in target_ids.tolist()
            sums["loss"] += float(one.detach())
        for name, value in sums.items():
            metrics[name].append(float(value))
    return loss, total, metrics
