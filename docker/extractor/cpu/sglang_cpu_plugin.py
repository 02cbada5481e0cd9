"""SGLang plugin: lets latent attention (DeepSeek, Kimi) and DP attention run on a CPU without AMX.

SGLang 0.5.23 picks the attention form by the backend's name, and for the two CPU backends it picks
one that reads keys and values which these backends do not keep; they keep the latent alone. The
absorbed form, which SGLang has for AMX machines, reads just that. DP attention pads batches, and
asks the backend how long a padding request is; torch_native has no answer, the AMX one says 1.
"""


def register() -> None:
    """Called by SGLang in each of its processes; does nothing on a server that has a GPU."""
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    for backend in ("torch_native", "intel_amx"):
        handlers.AttentionBackendRegistry.register(backend, handlers._dispatch_mla_subtype)
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _backend: 1
