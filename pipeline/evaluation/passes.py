"""Passes of the target over one answer: its cache, its taps, and taking back what was rejected."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from pipeline.evaluation.errors import UnsupportedTarget, WrongDrafter
from pipeline.target.load import decoder_layers, final_norm, with_cache


class TargetPasses:
    """One answer's way through the target; make a new one for each answer.

    target: an eval-mode Hugging Face causal language model. UnsupportedTarget when its cache cannot
    be cut back (sliding windows, linear attention), which speculative decoding needs.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._cache = DynamicCache(config=target.config)
        # Exactly this class: its subclasses keep a window or a state, not every row.
        odd = {type(layer).__name__ for layer in self._cache.layers} - {DynamicLayer.__name__}
        if odd:
            raise UnsupportedTarget(
                f"target {type(target).__name__} with cache layers {sorted(odd)}",
                wanted="full attention in every layer, whose cache can be cut back",
                next_step="evaluate this target on the server that will serve it",
            )
        self._with_cache = with_cache(target, self._cache)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return int(self._cache.get_seq_length())

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], *, last: int) -> Tensor:
        """Appends tokens [n]; gives the logits [last, V] of the last rows, in the model's dtype."""
        device = self._target.get_input_embeddings().weight.device
        output = self._target(
            input_ids=torch.tensor([list(tokens)], device=device),
            use_cache=True,
            **self._with_cache,
            logits_to_keep=last,
        )
        logits: Tensor = output.logits[0]
        return logits

    def keep(self, length: int) -> None:
        """Cuts the cache back to its first `length` tokens. UnsupportedTarget if it does not."""
        if self.length > length:
            self._cache.crop(length - self.length)
        if self.length != length:
            raise UnsupportedTarget(
                f"a cache of {self.length} tokens after cutting back",
                wanted=f"{length} tokens",
                next_step="please report it: the cache of this version of transformers differs",
            )


class TapRecorder:
    """The taps of the target's latest pass; filled while `recording` is open."""

    def __init__(self) -> None:
        self._parts: dict[int, Tensor] = {}

    def latest(self) -> Tensor:
        """[n, 3H]: the taps of the n tokens of the latest pass, low to high."""
        return torch.cat([self._parts[tap] for tap in sorted(self._parts)], -1)

    def put(self, tap: int, states: Tensor) -> None:
        """Keeps the residual stream [1, n, H] that enters a layer."""
        self._parts[tap] = states[0]


@contextmanager
def recording(target: Any, taps: Sequence[int]) -> Iterator[TapRecorder]:
    """Records taps of every pass of the target inside the block.

    Tap k is the residual stream entering decoder layer k; k = number of layers is what enters the
    final norm. WrongDrafter when the target has no such layer.
    """
    layers = decoder_layers(target)
    if max(taps) > len(layers):
        raise WrongDrafter(
            f"a drafter with taps {list(taps)} and a target of {len(layers)} layers",
            wanted=f"taps no higher than {len(layers)}",
            next_step="evaluate the drafter with the target it was trained on",
        )
    recorder = TapRecorder()
    handles = []
    try:
        for tap in taps:
            module = layers[tap] if tap < len(layers) else final_norm(target)
            handles.append(
                module.register_forward_pre_hook(_keeper(recorder, tap), with_kwargs=True)
            )
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def _keeper(recorder: TapRecorder, tap: int) -> Callable[..., None]:
    """A pre-hook that keeps a module's hidden states, given by place or by name."""

    def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.put(tap, args[0] if args else kwargs["hidden_states"])

    return keep
