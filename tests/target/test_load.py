import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pipeline.target.errors import FolderError, RemoteCodeRefused
from pipeline.target.load import decoder_layers, final_norm, head, load_target, with_cache
from pipeline.target.tensors import read_embedding, read_head
from pipeline.target.tokenizer import load_tokenizer

OWN_TOKENIZER = """\
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    own = True
"""


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def bring_code(folder: Path, reference: str) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "OwnTokenizer"
    config["auto_map"] = {"AutoTokenizer": [None, reference]}
    path.write_text(json.dumps(config))
    (folder / "own_tokenizer.py").write_text(OWN_TOKENIZER)


def test_the_head_on_final_states_gives_the_logits(tiny: Path) -> None:
    model = load_target(tiny, dtype=torch.float32, device="cpu")
    seen: list[torch.Tensor] = []
    final_norm(model).register_forward_hook(lambda _module, _args, out: seen.append(out))
    logits = model(torch.arange(20)[None]).logits
    torch.testing.assert_close(head(model)(seen[0]), logits)
    assert torch.equal(head(model).weight, read_head(tiny).float())
    assert torch.equal(model.get_input_embeddings().weight, read_embedding(tiny).float())


def test_a_model_is_loaded_for_reading_only(tiny: Path) -> None:
    model = load_target(tiny, dtype=torch.bfloat16, device="cpu")
    assert not model.training
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in model.parameters())
    assert len(decoder_layers(model)) == 4


@pytest.mark.parametrize("path", ["model.language_model", "language_model.model"])
def test_a_nested_decoder_is_found(path: str) -> None:
    decoder = nn.Module()
    decoder.layers = nn.ModuleList([nn.Identity()])
    decoder.norm = nn.LayerNorm(2)
    inner, outer = path.split(".")
    model, middle = nn.Module(), nn.Module()
    model.add_module(inner, middle)
    middle.add_module(outer, decoder)
    assert decoder_layers(model) is decoder.layers
    assert final_norm(model) is decoder.norm


def test_an_unknown_layout_is_refused_by_name() -> None:
    for part in (decoder_layers, final_norm, head):
        with pytest.raises(FolderError, match="Sequential"):
            part(nn.Sequential())


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_weight_is_never_initialised_in_silence(copy: Path, name: str) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights[name]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FolderError, match=name):
        load_target(copy, dtype=torch.float32, device="cpu")


def test_a_weight_without_a_place_is_refused(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.extra.weight"] = torch.zeros(2)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FolderError, match=r"layers\.0\.extra"):
        load_target(copy, dtype=torch.float32, device="cpu")


def test_a_folder_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="gone"):
        load_target(tmp_path / "gone", dtype=torch.float32, device="cpu")
    with pytest.raises(FolderError, match="gone"):
        load_tokenizer(tmp_path / "gone", remote_code=False)


def test_a_tokenizers_own_code_does_not_run_unless_allowed(copy: Path) -> None:
    bring_code(copy, "own_tokenizer.OwnTokenizer")
    (copy / "own_tokenizer.py").write_text(
        f"open({str(copy / 'ran')!r}, 'w').close()\n{OWN_TOKENIZER}"
    )
    with pytest.raises(RemoteCodeRefused, match=r"target\.remote_code"):
        load_tokenizer(copy, remote_code=False)
    assert not (copy / "ran").exists()


def test_a_tokenizers_own_code_runs_when_allowed(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    bring_code(copy, "own_tokenizer.OwnTokenizer")
    tokenizer = load_tokenizer(copy, remote_code=True)
    assert tokenizer.own
    assert tokenizer.decode(tokenizer("Hi 12", add_special_tokens=False)["input_ids"]) == "Hi 12"


@pytest.mark.parametrize("reference", ["some/repo--own_tokenizer.OwnTokenizer", "other.Own"])
def test_code_from_elsewhere_is_refused_even_when_allowed(copy: Path, reference: str) -> None:
    bring_code(copy, reference)
    with pytest.raises(RemoteCodeRefused, match="outside the folder"):
        load_tokenizer(copy, remote_code=True)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_by_the_name_that_the_class_knows(name: str) -> None:
    class Model(nn.Module):
        if name == "cache":

            def forward(self, input_ids, cache=None, **_others): ...
        else:

            def forward(self, input_ids, past_key_values=None, **_others): ...

    assert with_cache(Model(), 7) == {name: 7}


def test_a_class_without_a_cache_is_refused() -> None:
    with pytest.raises(FolderError, match="takes no key-value cache"):
        with_cache(nn.Identity(), 7)
