"""The hooks in SGLang's scheduler processes.

Three places, the same in 0.5.17 and 0.5.23: after `ModelRunner.init_attention_backends` the decoder
is told which layers to keep, past each class's own layer arithmetic; around
`LogitsProcessor.forward` the kept states and the normed final state are picked up; around
`TpModelWorker.forward_batch_generation` they are split among the requests, and each request whose
end ran gets its receipt, in `customized_info`, which SGLang carries into `meta_info`.
All ranks compute the same rows; rank 0 of each attention-TP group writes.
"""

import importlib
import logging
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.capture.sglang_plugin.configuration import (
    CaptureConfiguration,
    PluginError,
    check_version,
)
from pipeline.capture.sglang_plugin.request_state import (
    CapturedRequest,
    Refused,
    RequestStates,
    Slot,
    make_receipt,
)
from pipeline.capture.sglang_plugin.ring import StateCopier
from pipeline.capture.sglang_plugin.writer import StagedFile, Writer

RECEIPT = "cleanslate_capture"
_KEPT = "cleanslate_states"
REGISTRY = "sglang.srt.plugins.hook_registry"
# What is hooked, by which method of `Capture`, of which kind. `resolve` proves that they exist.
HOOKS = (
    (
        "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
        "after_backends",
        "AFTER",
    ),
    ("sglang.srt.layers.logits_processor.LogitsProcessor.forward", "around_logits", "AROUND"),
    (
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "around_forward",
        "AROUND",
    ),
)
_log = logging.getLogger("cleanslate.capture")


def register() -> None:
    """Entry point: sets the hooks if CLEANSLATE_CAPTURE names a file. PluginError if it cannot.

    SGLang only logs what is raised here; whoever starts the server must ask for a receipt.
    """
    # SGLang offers a plugin no other way to be told anything: this is the one variable read.
    named = os.environ.get("CLEANSLATE_CAPTURE")  # noqa: TID251
    if not named:
        return
    sglang = version("sglang")
    check_version(sglang)
    capture = Capture(
        CaptureConfiguration.read(Path(named)), sglang=sglang, plugin=version("cleanslate")
    )
    registry = importlib.import_module(REGISTRY)
    for target, method, kind in HOOKS:
        registry.HookRegistry.register(target, getattr(capture, method), registry.HookType[kind])


class Capture:
    """The hooks of one process and what they share."""

    def __init__(self, configuration: CaptureConfiguration, *, sglang: str, plugin: str) -> None:
        self._configuration = configuration
        self._origin: dict[str, Any] = {
            "taps": list(configuration.taps),
            "plugin": plugin,
            "sglang": sglang,
        }
        self._padded = False
        self._requests = RequestStates(rid_prefix=configuration.rid_prefix)
        self._files: dict[CapturedRequest, StagedFile] = {}
        self._copier: StateCopier | None = None
        self._writer: Writer | None = None

    def after_backends(self, _result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """Chooses the layers, and on the rank that writes takes the ring and starts the threads."""
        if runner.is_draft_worker:
            return
        taps = list(self._configuration.taps)
        runner.model.set_eagle3_layers_to_capture(None)
        decoder = find_decoder(runner.model)
        layers = len(decoder.layers)
        if taps[-1] >= layers:
            raise PluginError(f"taps {taps}; wanted layers under {layers}, those of the model")
        decoder.layers_to_capture = taps
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        self.start(
            device=torch.device(runner.device),
            rank={"tp": parallel.tp_rank, "dp": parallel.attn_dp_rank, "pid": os.getpid()},
            writes=parallel.attn_tp_rank == 0,
            padded=parallel.attn_dp_size > 1,
        )
        _log.info("capture: inputs of layers %s of %s", taps, type(runner.model).__name__)

    def start(
        self, *, device: torch.device, rank: dict[str, int], writes: bool, padded: bool
    ) -> None:
        """Takes the memory and starts the writers, if this rank writes.

        padded: DP attention may append rows to a forward batch, behind those of the requests.
        """
        self._padded = padded
        self._origin["rank"] = rank
        if writes:
            told = self._configuration
            self._copier = StateCopier(told.ring_bytes, device=device)
            self._writer = Writer(
                told.staging,
                quota_bytes=told.quota_bytes,
                threads=told.writer_threads,
                timeout_seconds=told.timeout_seconds,
            )

    def stop(self) -> None:
        """Ends the writers when all is written."""
        if self._writer is not None:
            self._writer.stop()

    def around_logits(
        self,
        original: Callable[..., Any],
        processor: Any,
        input_ids: Tensor,
        hidden_states: Tensor,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Keeps ids [T], taps [T, H] each and final [T, H] with the output of the forward."""
        output = original(
            processor,
            input_ids,
            hidden_states,
            lm_head,
            logits_metadata,
            aux_hidden_states,
            *args,
            **kwargs,
        )
        if self._writer is not None and aux_hidden_states is not None:
            setattr(output, _KEPT, (input_ids, aux_hidden_states, hidden_states))
        return output

    def around_forward(
        self,
        original: Callable[..., Any],
        worker: Any,
        batch: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Runs the forward, starts the copies of its rows and puts the receipts on its output."""
        extends = (
            batch is not None
            and batch.forward_mode.is_extend()
            and not batch.forward_mode.is_target_verify()
            and not getattr(worker, "is_draft_worker", False)
        )
        # Read before the forward: the overlap scheduler changes the batch as soon as it returns.
        lengths = (list(batch.prefix_lens), list(batch.extend_lens)) if extends else ([], [])
        result = original(worker, batch, *args, **kwargs)
        output = result.logits_output
        kept = None if output is None else output.__dict__.pop(_KEPT, None)
        if not extends or output is None:
            return result
        receipts: list[dict[str, Any] | None] = [None] * len(batch.reqs)
        if self._writer is not None and self._copier is not None:
            began = time.monotonic()
            receipts = self._take(self._copier, self._writer, batch.reqs, lengths, kept)
            self._writer.counters.hook_seconds += time.monotonic() - began
            self._writer.counters.ring_seconds = self._copier.waited_seconds
        info = output.customized_info or {}
        output.customized_info = {**info, RECEIPT: receipts}
        return result

    def _take(
        self,
        copier: StateCopier,
        writer: Writer,
        requests: Any,
        lengths: tuple[list[int], list[int]],
        kept: tuple[Tensor, Any, Tensor] | None,
    ) -> list[dict[str, Any] | None]:
        now = time.monotonic()
        limit = self._configuration.timeout_seconds
        for request in self._requests.abandoned(now=now, after_seconds=limit):
            self._drop(request, Refused("io", f"no further chunk came in {limit:g} s"))
        states, wrong = self._states(kept, sum(lengths[1]))
        slots = self._requests.plan(requests, *lengths, wrong=wrong, now=now)
        if kept is not None and states and any(slots):
            ids = kept[0].to(torch.int32)
            copier.ready(states, ids)
        for slot in slots:
            if slot is not None:
                self._copy(copier, writer, slot, states, ids if states else None)
        return [self._receipt(writer, slot) if slot and slot.last else None for slot in slots]

    def _states(
        self, kept: tuple[Tensor, Any, Tensor] | None, total: int
    ) -> tuple[list[Tensor], Refused | None]:
        """The taps and the final state, each [T, H], or what is wrong with them."""
        if kept is None:
            return [], Refused("no_states", "the forward gave no states (CUDA graphs on?)")
        ids, aux, final = kept
        width, taps = final.shape[-1], len(self._configuration.taps)
        # Some classes give one tensor [T, taps * H], the others a list of [T, H].
        parts = list(aux.chunk(taps, dim=-1)) if isinstance(aux, Tensor) else list(aux)
        if len(parts) != taps or any(part.shape[-1] != width for part in parts):
            shapes = [list(part.shape) for part in parts]
            return [], Refused("no_states", f"states {shapes} for {taps} taps of width {width}")
        rows = {len(tensor) for tensor in (*parts, final, ids)}
        if rows != {total} and not (self._padded and len(rows) == 1 and min(rows) > total):
            return [], Refused("row_count", f"{sorted(rows)} rows for {total} tokens")
        return [*parts, final], None

    def _copy(
        self,
        copier: StateCopier,
        writer: Writer,
        slot: Slot,
        states: list[Tensor],
        ids: Tensor | None,
    ) -> None:
        request = slot.request
        if slot.restarted is not None:
            self._drop(slot.restarted, Refused("retracted", "prefilled again from the start"))
        if request.refused is not None or ids is None:
            self._drop(request, request.refused or Refused("no_states", "no states"))
            return
        width = states[0].shape[1]
        file = self._files.get(request)
        if file is None:
            opened = writer.open(request, taps=len(states) - 1, width=width)
            if isinstance(opened, Refused):
                request.refuse(opened.reason, opened.detail)
                return
            file = self._files[request] = opened
        step = copier.rows_per_piece(2 * width * len(states) + 4)
        try:
            for done in range(0, slot.rows, step):
                piece = copier.copy(
                    states,
                    ids,
                    first_row=slot.first_row + done,
                    position=slot.position + done,
                    rows=min(step, slot.rows - done),
                    timeout_seconds=self._configuration.timeout_seconds,
                )
                writer.put(file, piece)
        except (TimeoutError, ValueError) as error:
            request.refuse("io", f"capture ring: {error}")
            self._drop(request, Refused("io", f"capture ring: {error}"))

    def _receipt(self, writer: Writer, slot: Slot) -> dict[str, Any]:
        request = slot.request
        receipt = make_receipt(request, origin=self._origin)
        file = self._files.pop(request, None)
        if file is None:
            return receipt
        if request.refused is not None:
            file.discard(request.refused)
            return receipt
        failure = writer.close(file)
        if failure is None:
            return receipt
        request.refuse(failure.reason, failure.detail)
        return make_receipt(request, origin=self._origin)

    def _drop(self, request: CapturedRequest, why: Refused) -> None:
        file = self._files.pop(request, None)
        if file is not None:
            file.discard(why)


def find_decoder(model: Any) -> Any:
    """The part of a model that has `layers_to_capture`, through language_model and model.

    PluginError for a class without one.
    """
    part = model
    while part is not None and not hasattr(part, "layers_to_capture"):
        part = getattr(part, "language_model", None) or getattr(part, "model", None)
    if part is None:
        raise PluginError(
            f"{type(model).__name__} has no layers_to_capture; wanted EAGLE-3 support"
        )
    return part
