import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.target.errors import FolderError, TensorError
from pipeline.target.tensors import check_ends, read_embedding, read_head

V, H = 6, 4
CONFIG = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "tie_word_embeddings": False,
}
INDEX = "model.safetensors.index.json"


def rows(first: int, *, vocabulary: int = V, hidden: int = H) -> Tensor:
    """[V, H], counting up from `first`: two such tensors are never mistaken."""
    count = torch.arange(vocabulary * hidden, dtype=torch.float32)
    return (count + first).reshape(vocabulary, hidden)


EMBEDDING, HEAD = rows(0), rows(1000)


def test_one_file_without_an_index_gives_both(write_folder: Any) -> None:
    folder = write_folder(
        {"model.safetensors": {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}},
        config=CONFIG,
    )
    assert torch.equal(read_embedding(folder), EMBEDDING)
    assert torch.equal(read_head(folder), HEAD)


def test_two_shards_give_both(write_folder: Any) -> None:
    folder = write_folder(
        {
            "model-1.safetensors": {"lm_head.weight": HEAD},
            "model-2.safetensors": {"model.embed_tokens.weight": EMBEDDING},
        },
        config=CONFIG,
        index={
            "lm_head.weight": "model-1.safetensors",
            "model.embed_tokens.weight": "model-2.safetensors",
        },
    )
    assert torch.equal(read_embedding(folder), EMBEDDING)
    assert torch.equal(read_head(folder), HEAD)


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_a_nested_language_model_gives_both(write_folder: Any, embedding: str, head: str) -> None:
    folder = write_folder(
        {"model.safetensors": {embedding: EMBEDDING, head: HEAD, "vision.weight": rows(5)}},
        config={
            "model_type": "kimi_k25",
            "text_config": {"vocab_size": V, "hidden_size": H, "tie_word_embeddings": False},
        },
    )
    assert torch.equal(read_embedding(folder), EMBEDDING)
    assert torch.equal(read_head(folder), HEAD)


@pytest.mark.parametrize(
    "said",
    [
        {"tie_word_embeddings": True},
        {"text_config": {"vocab_size": V, "hidden_size": H, "tie_word_embeddings": True}},
        {"model_type": "gemma2"},  # says nothing: its class is tied
    ],
)
def test_a_tied_target_has_its_embedding_as_head(write_folder: Any, said: dict[str, Any]) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"} | said
    folder = write_folder(
        {"model.safetensors": {"model.embed_tokens.weight": EMBEDDING}}, config=config
    )
    assert torch.equal(read_head(folder), EMBEDDING)


def test_a_tied_target_with_another_head_is_refused(write_folder: Any) -> None:
    folder = write_folder(
        {"model.safetensors": {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}},
        config=CONFIG | {"tie_word_embeddings": True},
    )
    with pytest.raises(TensorError, match=r"lm_head.weight differs"):
        read_head(folder)


@pytest.mark.parametrize(
    "packed",
    [
        {"lm_head.weight_packed": torch.zeros(6, 1, dtype=torch.int32)},
        {"lm_head.qweight": torch.zeros(6, 1, dtype=torch.int32), "lm_head.scales": torch.ones(6)},
    ],
)
def test_a_packed_head_is_refused_by_name(write_folder: Any, packed: dict[str, Tensor]) -> None:
    folder = write_folder(
        {"model.safetensors": {"model.embed_tokens.weight": EMBEDDING} | packed}, config=CONFIG
    )
    with pytest.raises(TensorError, match=next(iter(packed))):
        read_head(folder)


@pytest.mark.parametrize("beside", ["lm_head.weight_scale", "lm_head.bias"])
def test_a_head_that_does_not_count_as_it_stands_is_refused(write_folder: Any, beside: str) -> None:
    weights = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    folder = write_folder({"model.safetensors": weights | {beside: torch.ones(V)}}, config=CONFIG)
    with pytest.raises(TensorError, match=f"beside lm_head.weight lies {beside}"):
        read_head(folder)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma2"}, "final_logit_softcapping"),  # its class caps unasked
        ({"model_type": "cohere"}, "logit_scale"),
        ({"text_config": CONFIG | {"logits_scaling": 8.0}}, "logits_scaling"),
    ],
)
def test_logits_that_are_not_the_head_s_product_alone_are_refused(
    write_folder: Any, said: dict[str, Any], key: str
) -> None:
    weights = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    folder = write_folder({"model.safetensors": weights}, config=CONFIG | said)
    with pytest.raises(TensorError, match=key):
        check_ends(folder)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"model_type": "gemma2", "final_logit_softcapping": None},
        {"model_type": "granite", "logits_scaling": 1.0},
        {"model_type": "never_heard_of"},
    ],
)
def test_a_plain_head_passes(write_folder: Any, said: dict[str, Any]) -> None:
    weights = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    check_ends(write_folder({"model.safetensors": weights}, config=CONFIG | said))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_weight_under_the_plain_name_is_refused(
    write_folder: Any, dtype: torch.dtype
) -> None:
    folder = write_folder(
        {
            "model.safetensors": {
                "model.embed_tokens.weight": EMBEDDING,
                "lm_head.weight": torch.zeros(V, H).to(dtype),
            }
        },
        config=CONFIG,
    )
    with pytest.raises(TensorError, match="quantised"):
        read_head(folder)


def test_a_missing_shard_is_named(write_folder: Any) -> None:
    folder = write_folder(
        {"model-1.safetensors": {"model.embed_tokens.weight": EMBEDDING}},
        config=CONFIG,
        index={
            "model.embed_tokens.weight": "model-1.safetensors",
            "lm_head.weight": "model-2.safetensors",
        },
    )
    with pytest.raises(FolderError, match=r"model-2\.safetensors"):
        read_embedding(folder)


def test_an_index_that_points_into_the_wrong_shard_is_refused(write_folder: Any) -> None:
    folder = write_folder(
        {
            "model-1.safetensors": {"model.embed_tokens.weight": EMBEDDING},
            "model-2.safetensors": {"lm_head.weight": HEAD},
        },
        config=CONFIG,
        index={
            "model.embed_tokens.weight": "model-2.safetensors",
            "lm_head.weight": "model-2.safetensors",
        },
    )
    with pytest.raises(FolderError, match=r"embed_tokens.weight is not in model-2"):
        read_embedding(folder)


def test_an_index_that_leaves_the_folder_is_refused(write_folder: Any) -> None:
    folder = write_folder(
        {}, config=CONFIG, index={"model.embed_tokens.weight": "../other.safetensors"}
    )
    with pytest.raises(FolderError, match="other"):
        read_embedding(folder)


def test_two_layouts_in_one_folder_are_refused(write_folder: Any) -> None:
    folder = write_folder(
        {"model.safetensors": {"model.embed_tokens.weight": EMBEDDING}},
        config=CONFIG,
        index={"model.embed_tokens.weight": "model.safetensors"},
    )
    with pytest.raises(FolderError, match="both"):
        read_embedding(folder)


def test_pickled_weights_alone_are_refused(write_folder: Any) -> None:
    folder = write_folder({}, config=CONFIG)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FolderError, match=r"pytorch_model\.bin"):
        read_embedding(folder)


def test_an_absent_embedding_names_what_was_looked_for_and_the_near_ones(
    write_folder: Any,
) -> None:
    folder = write_folder(
        {"model.safetensors": {"transformer.wte.weight": EMBEDDING, "other": rows(3)}},
        config=CONFIG,
    )
    with pytest.raises(TensorError) as caught:
        read_embedding(folder)
    assert "looked for model.embed_tokens.weight" in str(caught.value)
    assert "near ones: transformer.wte.weight" in str(caught.value)


def test_an_untied_target_without_a_head_is_refused(write_folder: Any) -> None:
    folder = write_folder(
        {"model.safetensors": {"model.embed_tokens.weight": EMBEDDING}}, config=CONFIG
    )
    with pytest.raises(TensorError, match=r"head of an untied target; looked for lm_head\.weight"):
        read_head(folder)


def test_an_embedding_under_two_names_is_refused(write_folder: Any) -> None:
    folder = write_folder(
        {
            "model.safetensors": {
                "model.embed_tokens.weight": EMBEDDING,
                "embed_tokens.weight": rows(9),
            }
        },
        config=CONFIG,
    )
    with pytest.raises(TensorError, match="2 names"):
        read_embedding(folder)


@pytest.mark.parametrize("shape", [(V + 1, H), (V, H + 1)])
@pytest.mark.parametrize("nested", [False, True])
def test_another_size_than_the_configuration_is_refused(
    write_folder: Any, shape: tuple[int, int], nested: bool
) -> None:
    wrong = rows(0, vocabulary=shape[0], hidden=shape[1])
    folder = write_folder(
        {
            "model.safetensors": {
                "model.embed_tokens.weight": wrong,
                "lm_head.weight": wrong.clone(),
            }
        },
        config={"model_type": "x", "tie_word_embeddings": False, "text_config": CONFIG}
        if nested
        else CONFIG,
    )
    for read in (read_embedding, read_head):
        with pytest.raises(TensorError, match=rf"\[{shape[0]}, {shape[1]}\].*\[{V}, {H}\]"):
            read(folder)


def test_a_value_that_is_not_finite_is_refused(write_folder: Any) -> None:
    broken = EMBEDDING.clone()
    broken[2, 1] = float("nan")
    folder = write_folder(
        {"model.safetensors": {"model.embed_tokens.weight": broken}}, config=CONFIG
    )
    with pytest.raises(TensorError, match="not finite"):
        read_embedding(folder)


@pytest.mark.parametrize("cut", [1, 8, 100])
def test_a_cut_file_is_refused(write_folder: Any, cut: int) -> None:
    folder = write_folder(
        {"model.safetensors": {"model.embed_tokens.weight": EMBEDDING}}, config=CONFIG
    )
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(FolderError, match=r"model\.safetensors"):
        read_embedding(folder)


def test_one_file_and_shards_with_an_index_are_the_same_target(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(read_embedding(folder), read_embedding(tiny))
    assert torch.equal(read_head(folder), read_head(tiny))
