"""The reference engine: transformers, in real batches, keeping only the tapped states.

Samples of a group run as one right-padded batch. Attention is causal, so padding behind a sample
cannot change its rows. Hooks copy the tapped inputs and the final norm's output; the head is not
run, and other layers' states are not kept.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.capture.contract import Answer, GroupDone, Receipt, Refusal, Request, ids_digest
from pipeline.capture.staging import Staging
from pipeline.target.load import decoder_layers, final_norm, load_target

_STAGING_TIMEOUT_SECONDS = 3600.0


class TransformersEngine:
    """Runs groups one after the other in this process."""

    def __init__(
        self,
        folder: Path,
        staging: Staging,
        *,
        taps: Sequence[int],
        dtype: torch.dtype,
        device: str,
        remote_code: bool,
    ) -> None:
        self._model: Any = load_target(folder, dtype=dtype, device=device, remote_code=remote_code)
        self._staging, self._taps, self._device = staging, tuple(taps), device
        self._caught: dict[str, Tensor] = {}
        layers = decoder_layers(self._model)
        for number, tap in enumerate(self._taps):
            layers[tap].register_forward_pre_hook(self._tap_hook(f"tap_{number}"), with_kwargs=True)
        final_norm(self._model).register_forward_hook(self._final_hook)
        self._groups: list[Sequence[Request]] = []
        self._served = self._files = 0

    def _tap_hook(self, name: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            state = args[0] if args else kwargs["hidden_states"]
            self._caught[name] = state.detach()

        return hook

    def _final_hook(self, _module: Any, _args: Any, output: Tensor) -> None:
        self._caught["final"] = output.detach()

    def submit(self, group: Sequence[Request]) -> None:
        """See `Engine.submit`."""
        self._groups.append(group)

    def answers(self) -> Iterator[Answer]:
        """See `Engine.answers`."""
        while self._groups:
            group = self._groups.pop(0)
            yield from self._run(group)
            # Counted before the answer: a caller may never come back to this generator.
            self._served += 1
            yield GroupDone(self._served - 1)

    @torch.inference_mode()
    def _run(self, group: Sequence[Request]) -> Iterator[Receipt | Refusal]:
        lengths = [len(request.input_ids) for request in group]
        ids = torch.zeros(len(group), max(lengths), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(group):
            ids[row, : lengths[row]] = request.input_ids
            mask[row, : lengths[row]] = 1
        self._caught.clear()
        base = self._model.base_model
        base(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            use_cache=False,
        )
        caught = {name: state.to(torch.bfloat16).cpu() for name, state in self._caught.items()}
        wanted = {"final", *(f"tap_{number}" for number in range(len(self._taps)))}
        for row, request in enumerate(group):
            if set(caught) != wanted:
                missing = sorted(wanted - set(caught))
                yield Refusal(request.id, "hooks", f"hooks for {missing} did not run")
                continue
            n = lengths[row]
            tensors = {name: state[row, :n].contiguous() for name, state in caught.items()}
            tensors["input_ids"] = request.input_ids.to(torch.int32).contiguous()
            name = f"{self._files:08d}.safetensors"
            self._files += 1
            self._staging.write(name, tensors, timeout_seconds=_STAGING_TIMEOUT_SECONDS)
            yield Receipt(
                id=request.id,
                rows=tensors["final"].shape[0],
                spans=((0, n),),
                ids_sha256=ids_digest(ids[row, :n]),
                dtype="bfloat16",
                taps=self._taps,
                file=name,
                logprobs=self._own_logprobs(request) if request.logprobs else None,
            )

    def _own_logprobs(self, request: Request) -> tuple[float, ...]:
        """Log-probabilities by a forward pass of their own: alone, unpadded, through the head."""
        ids = request.input_ids.long()[None].to(self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        scores = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])
        return tuple(scores[:, 0].tolist())
