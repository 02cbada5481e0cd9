import textwrap
from pathlib import Path

import pytest

from pipeline.capture.sglang_plugin.hooks import HOOKS, Capture
from pipeline.capture.sglang_plugin.resolve import problems, relied_on

RUNNER = "srt/model_executor/model_runner.py"
LOGITS = "srt/layers/logits_processor.py"
WORKER = "srt/managers/tp_worker.py"
REGISTRY = "srt/plugins/hook_registry.py"
SOURCES = {
    RUNNER: """
        class ModelRunner:
            def init_attention_backends(self): ...
    """,
    LOGITS: """
        class LogitsProcessor:
            def forward(self, input_ids, hidden_states, lm_head, logits_metadata,
                        aux_hidden_states=None, hidden_states_before_norm=None): ...
    """,
    WORKER: """
        class TpModelWorker:
            def forward_batch_generation(self, batch, forward_batch=None, *, mode=None): ...
    """,
    REGISTRY: """
        class HookType:
            AFTER = "after"
            AROUND = "around"
        class HookRegistry:
            def register(cls, target, hook, hook_type): ...
    """,
}


def sglang(root: Path, **changed: tuple[str, str]) -> Path:
    """As much of SGLang's source as the hooks name; changed: file -> (old, new)."""
    for name, text in SOURCES.items():
        old, new = changed.get(Path(name).stem, ("", ""))
        assert old in text
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        text = textwrap.dedent(text)
        (root / name).write_text(text.replace(old, new) if old else text, encoding="utf-8")
    return root


def test_every_hook_resolves_in_a_source_that_has_them(tmp_path: Path) -> None:
    assert problems(root=sglang(tmp_path)) == []


def test_a_hook_relies_on_the_arguments_that_it_names() -> None:
    wanted = {
        "after_backends": [],
        "around_logits": [
            "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states",
        ],
        "around_forward": ["batch"],
    }  # fmt: skip
    assert {m: relied_on(getattr(Capture, m), kind) for _, m, kind in HOOKS} == wanted


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("model_runner", "init_attention_backends", "init_backends", "no init_attention_backends"),
        ("model_runner", "class ModelRunner", "class Runner", "no ModelRunner"),
        ("logits_processor", "hidden_states, lm_head", "lm_head, hidden_states", "begin with"),
        ("logits_processor", "aux_hidden_states=None", "aux=None", "begin with"),
        ("tp_worker", "batch, forward_batch=None", "forward_batch, batch=None", "begin with"),
        ("tp_worker", "def forward_batch", "async def forward_batch", "wanted a plain method"),
        ("hook_registry", "AROUND", "WRAP", "no AROUND"),
        ("hook_registry", "def register", "def add", "no register"),
    ],
)
def test_a_change_of_sglang_is_named(
    tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    found = problems(root=sglang(tmp_path, **{file: (old, new)}))
    assert len(found) == 1
    assert said in found[0]


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    root = sglang(tmp_path)
    (root / WORKER).unlink()
    assert len(found := problems(root=root)) == 1
    assert "tp_worker.py" in found[0]
