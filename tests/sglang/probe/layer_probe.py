"""SGLang plugin for tests: writes down which layers a server captures, and the states themselves.

For every prefill of the target that comes with captured states, `states-<n>.safetensors` in the
folder that LAYER_PROBE names: input_ids [T], aux_0.. [T, H], in the server's own order.
"""

import itertools
import json
import os
from pathlib import Path

from safetensors.torch import save_file

_NUMBERS = itertools.count()


def register() -> None:
    if not (named := os.environ.get("LAYER_PROBE")):  # noqa: TID251
        return
    folder = Path(named)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_backends(_result, runner, *_args, **_kwargs):
        if runner.is_draft_worker:
            return
        decoder = runner.model.model
        found = {"class": type(runner.model).__name__, "layers": list(decoder.layers_to_capture)}
        (folder / "layers.json").write_text(json.dumps(found))

    def around_logits(original, processor, input_ids, hidden, head, meta, aux=None, *args, **more):
        output = original(processor, input_ids, hidden, head, meta, aux, *args, **more)
        if aux is not None:
            parts = list(aux.chunk(3, dim=-1)) if hasattr(aux, "chunk") else list(aux)
            tensors = {f"aux_{n}": part.float().contiguous() for n, part in enumerate(parts)}
            tensors["input_ids"] = input_ids.clone()
            partial = folder / ".partial"
            save_file(tensors, partial)
            partial.rename(folder / f"states-{next(_NUMBERS):05d}.safetensors")
        return output

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
        after_backends,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.layers.logits_processor.LogitsProcessor.forward",
        around_logits,
        HookType.AROUND,
    )
