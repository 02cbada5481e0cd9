from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.target.errors import GgufError, WeightMismatch
from pipeline.target.gguf import convert_gguf
from pipeline.target.gguf_check import check_weights
from pipeline.target.load import load_target
from pipeline.target.tokenizer import load_tokenizer

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 256, 8, 4, 512, 2
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

GgufWriter = Callable[..., Path]


def source_model(*, tied: bool = False) -> Any:
    """A random Hugging Face Llama: what a GGUF file is made of."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        vocab_size=len(tokens()),
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


def tokens() -> list[str]:
    """Markers, one-byte tokens of GPT-2's alphabet, and one merge."""
    from tokenizers import pre_tokenizers

    return [*MARKERS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]


def interleaved(weight: Any, heads: int) -> Any:
    """llama.cpp's order of query and key rows, as its converter makes it from Hugging Face's."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return split.swapaxes(1, 2).reshape(weight.shape)


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(model: Any) -> dict[str, Any]:
    """A Hugging Face Llama's weights in GGUF's names and order, float32 numpy."""
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    found = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        found["output.weight"] = state["lm_head.weight"]
    for layer in range(LAYERS):
        for name, short in NAMES.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            if short == "attn_q":
                weight = interleaved(weight, HEADS)
            if short == "attn_k":
                weight = interleaved(weight, KV_HEADS)
            found[f"blk.{layer}.{short}.weight"] = weight
    return found


@pytest.fixture
def write_gguf(tmp_path: Path) -> GgufWriter:
    """Writes a GGUF file; matrices in the given block kind, vectors in float32."""

    def write(
        tensors: dict[str, Any],
        *,
        kind: str = "F32",
        pre: str = "smollm",
        architecture: str = "llama",
        template: str | None = "{{ messages[0]['content'] }}",
        specials: bool = True,
        scaling: bool = False,
    ) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(50000.0)
        writer.add_layer_norm_rms_eps(1e-6)
        if scaling:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        vocabulary = tokens()
        if not specials:
            vocabulary = ["a1", "a2", "a3", *vocabulary[3:]]
        writer.add_token_list(vocabulary)
        writer.add_token_types([3 if token in MARKERS else 1 for token in vocabulary])
        writer.add_token_merges(["1 2"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if template is not None:
            writer.add_chat_template(template)
        block = gguf.GGMLQuantizationType[kind]
        for name, values in tensors.items():
            if values.ndim == 1 or kind == "F32":
                writer.add_tensor(name, values)
            elif kind == "Q6_K":  # the gguf package cannot write it: any bytes with a small scale
                raw = np.random.default_rng(5).integers(0, 256, (values.size // 256, 210))
                raw = raw.astype(np.uint8)
                raw[:, 208:] = np.array([0.001], dtype="<f2").view(np.uint8)
                raw = raw.reshape(values.shape[0], -1)
                writer.add_tensor(name, raw, raw_dtype=block)
            else:
                writer.add_tensor(name, quants.quantize(values, block), raw_dtype=block)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.mark.parametrize("tied", [False, True])
def test_a_float_file_gives_the_source_weights_back(
    write_gguf: GgufWriter, tmp_path: Path, tied: bool
) -> None:
    source = source_model(tied=tied)
    report = convert_gguf(write_gguf(gguf_tensors(source)), tmp_path / "hf")
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in source.state_dict().items()}
    if tied:
        del wanted["lm_head.weight"]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert report.tied == tied
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_converted_model_gives_the_source_models_logits(
    write_gguf: GgufWriter, tmp_path: Path
) -> None:
    source = source_model()
    convert_gguf(write_gguf(gguf_tensors(source)), tmp_path / "hf")
    source.load_state_dict(
        {name: tensor.bfloat16().float() for name, tensor in source.state_dict().items()}
    )
    model = load_target(tmp_path / "hf", dtype=torch.float32, device="cpu")
    ids = torch.arange(40)[None] * 3
    torch.testing.assert_close(model(ids).logits, source(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_every_block_kind_passes_the_independent_check(
    write_gguf: GgufWriter, tmp_path: Path, kind: str
) -> None:
    path = write_gguf(gguf_tensors(source_model()), kind=kind)
    report = convert_gguf(path, tmp_path / "hf")
    check = check_weights(path, tmp_path / "hf")
    assert report.kinds[kind] >= 2 + 7 * LAYERS
    assert check.tensors == 3 + 9 * LAYERS
    assert check.greatest_difference < 0.02


def test_the_check_unpacks_a_block_written_by_hand() -> None:
    from pipeline.target.gguf_check import _UNPACK

    scale, least = np.array([0.5], dtype="<f2"), np.array([-1.0], dtype="<f2")
    nibbles = np.array([0x21] + [0x00] * 15, dtype=np.uint8)  # value 0 is 1, value 16 is 2
    raw = np.concatenate([scale.view(np.uint8), least.view(np.uint8), nibbles])
    wanted = np.full(32, -1.0)
    wanted[0], wanted[16] = -0.5, 0.0
    assert _UNPACK["Q4_1"](raw).ravel().tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"]
)
def test_two_swapped_rows_are_noticed_and_named(
    write_gguf: GgufWriter, tmp_path: Path, name: str
) -> None:
    path = write_gguf(gguf_tensors(source_model()), kind="Q8_0")
    convert_gguf(path, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights[name][[1, 2]] = weights[name][[2, 1]]
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(WeightMismatch, match=name):
        check_weights(path, tmp_path / "hf")


def test_one_flipped_bit_is_noticed_and_named(write_gguf: GgufWriter, tmp_path: Path) -> None:
    path = write_gguf(gguf_tensors(source_model()), kind="Q4_1")
    convert_gguf(path, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].view(torch.int16)[3, 5] ^= 1
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(WeightMismatch, match=r"layers\.1\.mlp\.down_proj.*1 of .*\(3, 5\)"):
        check_weights(path, tmp_path / "hf")


def test_a_tensor_on_one_side_only_is_noticed(write_gguf: GgufWriter, tmp_path: Path) -> None:
    path = write_gguf(gguf_tensors(source_model()))
    convert_gguf(path, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(WeightMismatch, match="output_norm"):
        check_weights(path, tmp_path / "hf")


def test_another_architecture_is_refused_by_name(write_gguf: GgufWriter, tmp_path: Path) -> None:
    path = write_gguf(gguf_tensors(source_model()), architecture="qwen2")
    with pytest.raises(GgufError, match="qwen2"):
        convert_gguf(path, tmp_path / "hf")


def test_rotary_scaling_is_refused(write_gguf: GgufWriter, tmp_path: Path) -> None:
    path = write_gguf(gguf_tensors(source_model()), scaling=True)
    with pytest.raises(GgufError, match=r"rope\.scaling"):
        convert_gguf(path, tmp_path / "hf")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight"),
        (lambda t: t.update({"rope_freqs.weight": np.ones(4, np.float32)}), "rope_freqs.weight"),
        (lambda t: t.update({"output_norm.weight": np.ones(8, np.float32)}), "output_norm.weight"),
        (
            lambda t: t.update({"output_norm.weight": np.full(HIDDEN, np.inf, np.float32)}),
            "not finite",
        ),
    ],
)
def test_a_wrong_set_of_tensors_is_refused_by_name(
    write_gguf: GgufWriter, tmp_path: Path, change: Callable[[dict[str, Any]], Any], named: str
) -> None:
    tensors = gguf_tensors(source_model())
    change(tensors)
    with pytest.raises(GgufError, match=named):
        convert_gguf(write_gguf(tensors), tmp_path / "hf")
    assert not (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.parametrize("keep", [0, 10, 3000])
def test_a_cut_file_is_refused(write_gguf: GgufWriter, tmp_path: Path, keep: int) -> None:
    path = write_gguf(gguf_tensors(source_model()))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(GgufError, match=r"model\.gguf"):
        convert_gguf(path, tmp_path / "hf")


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_digits_are_split_exactly_where_the_file_says_so(
    write_gguf: GgufWriter, tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    convert_gguf(write_gguf(gguf_tensors(source_model()), pre=pre), tmp_path / "hf")
    tokenizer = load_tokenizer(tmp_path / "hf", remote_code=False)
    assert tokenizer.tokenize("12") == pieces


def test_an_unknown_pre_tokenizer_is_refused(write_gguf: GgufWriter, tmp_path: Path) -> None:
    path = write_gguf(gguf_tensors(source_model()), pre="deepseek-llm")
    with pytest.raises(GgufError, match="deepseek-llm"):
        convert_gguf(path, tmp_path / "hf")


def test_a_file_without_a_template_gets_chatml(write_gguf: GgufWriter, tmp_path: Path) -> None:
    path = write_gguf(gguf_tensors(source_model()), template=None)
    report = convert_gguf(path, tmp_path / "hf")
    tokenizer = load_tokenizer(tmp_path / "hf", remote_code=False)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert report.tokenizer.template_origin == "chatml"
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_neither_template_nor_markers_is_refused(write_gguf: GgufWriter, tmp_path: Path) -> None:
    path = write_gguf(gguf_tensors(source_model()), template=None, specials=False)
    with pytest.raises(GgufError, match="no chat template"):
        convert_gguf(path, tmp_path / "hf")
