"""The drafter: one decoder layer that reads the target's taps and the next token's embedding.

State-dict names are the export names (SGLang 0.5.23 and vLLM `models/llama_eagle3.py`). The model
knows no steps, documents or caches: `ttt.py` (training) and evaluation compose these methods.

    hidden = model.fuse(taps)                    step 0; later steps: model.recurrent(hidden)
    q, k, v = model.qkv(hidden, embeds)          then rotate q and k, attend
    hidden = model.finish(hidden, attended)      before the final norm
    logits = model.logits(hidden)                over the draft vocabulary
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.draft.config import DrafterConfig
from pipeline.draft.errors import ConfigError
from pipeline.draft.rotary import RotaryTable, rotary_table

INITIAL_SPREAD = 0.02
"""Standard deviation of fresh projections: the value of the Llama family's own configs."""


class Norm(nn.Module):
    """RMS norm over the last dimension, weight [H]."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normed x [*, H], same dtype."""
        return functional.rms_norm(x, list(self.weight.shape), self.weight, self.eps)


class Attention(nn.Module):
    """The four projections; q, k and v read cat(normed embedding, normed hidden) [*, 2H]."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.q_proj = nn.Linear(2 * H, config.query_width, bias=False)
        self.k_proj = nn.Linear(2 * H, config.kv_width, bias=False)
        self.v_proj = nn.Linear(2 * H, config.kv_width, bias=False)
        self.o_proj = nn.Linear(config.query_width, H, bias=False)


class Mlp(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, inner, bias=False)
        self.up_proj = nn.Linear(H, inner, bias=False)
        self.down_proj = nn.Linear(inner, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [*, H] to [*, H]."""
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """The one decoder layer's parameters."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.hidden_norm = Norm(H, eps=eps)
        self.input_layernorm = Norm(H, eps=eps)
        self.post_attention_layernorm = Norm(H, eps=eps)


class Drafter(nn.Module):
    """An EAGLE-3 drafter. The embedding is the target's, frozen, and passed in by the caller."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        H = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, H, bias=False)
        self.midlayer = Layer(config)
        self.norm = Norm(H, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(H, config.draft_vocabulary_size, bias=False)

    @classmethod
    def initialised(cls, config: DrafterConfig, *, head_rows: Tensor, seed: int) -> "Drafter":
        """A fresh float32 drafter on the CPU; the same `seed` gives the same bits.

        head_rows [D, Ht]: the target head's rows of the draft vocabulary, the head's start.
        Other projections: normal, INITIAL_SPREAD; norms: one. ConfigError if head_rows do not fit.
        """
        wanted = (config.draft_vocabulary_size, config.hidden_size)
        if tuple(head_rows.shape) != wanted:
            raise ConfigError(
                f"target head rows {list(head_rows.shape)}",
                wanted=f"{list(wanted)}: draft vocabulary x hidden size",
                next_step="build the draft vocabulary from the same target: make prepare",
            )
        with torch.device("meta"):
            model = cls(config)
        model.to_empty(device="cpu")
        model = model.to(torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if name == "lm_head.weight":
                    parameter.copy_(head_rows)
                elif parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, INITIAL_SPREAD, generator=generator)
        return model

    def fuse(self, taps: Tensor) -> Tensor:
        """Taps [*, 3 * Ht], low to high, to the first hidden state (and residual) [*, H]."""
        fused: Tensor = self.fc(taps)
        return fused

    def qkv(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [*, heads, d], key and value [*, kv_heads, d], not yet rotated.

        hidden [*, H]: `fuse` or `recurrent` output. embeds [*, H]: embedding of the *next* token.
        """
        layer, d = self.midlayer, self.config.head_dim
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
        q, k, v = (
            projection(x).unflatten(-1, (-1, d))
            for projection in (
                layer.self_attn.q_proj,
                layer.self_attn.k_proj,
                layer.self_attn.v_proj,
            )
        )
        return q, k, v

    def rotary(self, position: Tensor) -> RotaryTable:
        """Rotary table at `position` int64 [R] for `rotate`, in the model's dtype."""
        return rotary_table(self.config, position, dtype=self.lm_head.weight.dtype)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [*, H], before the final norm.

        residual [*, H]: the hidden state that `qkv` got. attended [*, heads, d].
        """
        layer = self.midlayer
        hidden: Tensor = residual + layer.self_attn.o_proj(attended.flatten(-2))
        inner: Tensor = layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden + inner

    def recurrent(self, hidden: Tensor) -> Tensor:
        """What the next step takes as hidden state and residual: `finish` output, normed or not."""
        if not self.config.norm_output:
            return hidden
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """`finish` output [*, H] to logits over the draft vocabulary [*, D]."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits
