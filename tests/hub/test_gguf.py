"""Files that llama.cpp's converter would write load here with transformers' logits, and are written so from here."""

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf import load_gguf
from forge_mlx.hub.gguf_keys import config_keys
from forge_mlx.hub.gguf_write import write_gguf
from forge_mlx.hub.pretrained import load_pretrained, read_shape, save_pretrained
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.models.rope_scaling import RopeScaling, scaled_periods
from forge_mlx.nn.quantized import QuantizedEmbedding, QuantizedLinear
import gguf
from gguf_checks import TOKENS, assert_close, contents, logits, quiet, their_logits
from gguf_oracle import CONFIGS, V, published, write_gguf_of
import mlx.core as mx
from mlx.utils import tree_flatten
import numpy as np
import pytest
import torch

FAST = ("llama", "llama, other limits", "gemma3")
ARCHITECTURES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


def dequantized(model, kind):
    """transformers' model with matrices that were in blocks."""
    number = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "wpe" not in name:
                # GPT-2's matrices lie the other way round in transformers.
                flips = name.rpartition(".")[0].endswith(("c_attn", "c_proj", "c_fc"))
                rows = np.ascontiguousarray(parameter.numpy().T if flips else parameter.numpy())
                values = gguf.dequantize(gguf.quantize(rows, number), number).reshape(rows.shape)
                parameter.copy_(torch.from_numpy(values.T if flips else values))
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers_and_the_file_is_written_again(tmp_path, name):
    theirs = published(name)
    file = write_gguf_of(tmp_path / "model.gguf", theirs, name)
    loaded = load_gguf(file, log=quiet)
    assert_close(logits(loaded.model), their_logits(theirs))
    assert all(array.dtype == mx.float32 for _, array in tree_flatten(loaded.model.parameters()))

    counts = write_gguf(tmp_path / "again.gguf", loaded.model, loaded.tokenizer, kind="f32")
    values, tensors = contents(tmp_path / "again.gguf")
    wanted_values, wanted_tensors = contents(file)
    assert counts == {"F32": len(wanted_tensors)}
    for key, value in wanted_values.items():
        assert values[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert tensors.keys() == wanted_tensors.keys()
    for key, (kind, shape, data) in wanted_tensors.items():
        assert tensors[key][:2] == (kind, shape), key
        # Gemma's norms lost a bit when 1 was taken away; the factors of a rotation are computed.
        atol = 2e-7 if "norm" in key or key == "rope_freqs.weight" else 0
        np.testing.assert_allclose(tensors[key][2], data, rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize(
    ("factor", "low", "high", "length"),
    [
        (8.0, 1.0, 4.0, 8192),
        (8.0, 1.0, 2.0, 8192),
        (4.0, 0.5, 3.0, 64),
        (32.0, 40.0, 41.0, 16),
        (2.0, 0.001, 0.002, 16),
    ],
    ids=["Llama 3.1's", "none between", "some", "all divided", "none divided"],
)
def test_any_limits_of_llama_3_s_scaling_are_read_again(tmp_path, factor, low, high, length):
    scaling = RopeScaling(
        kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_seq_len=length
    )
    shape = {"vocab_size": V, "num_layers": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 32}
    source = load_gguf(write_gguf_of(tmp_path / "source.gguf", published("llama"), "llama"), log=quiet)
    model = GPT(GPTConfig(**shape, rope_scaling=scaling), seed=1).eval()
    write_gguf(tmp_path / "model.gguf", model, source.tokenizer, kind="f32")
    frequencies = 10000.0 ** -(np.arange(0, 32, 2) / 32)
    kept = np.clip((length * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
    frequencies *= (1 - kept) / factor + kept
    found = read_shape(tmp_path / "model.gguf")
    np.testing.assert_allclose(1 / scaled_periods(found.rope_scaling, 32, 10000.0), frequencies, rtol=2e-6)
    assert_close(logits(load_gguf(tmp_path / "model.gguf", log=quiet).model), logits(model), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_codes_compute_what_they_stand_for(tmp_path, name, kind):
    file = write_gguf_of(tmp_path / "model.gguf", published(name), name, kind=kind)
    expected = their_logits(dequantized(published(name), kind))
    loaded = load_gguf(file, dtype=mx.float32, log=quiet)
    assert_close(logits(loaded.model), expected)
    floats = load_gguf(file, dtype=mx.float32, keep_quantized=False, log=quiet)
    assert_close(logits(floats.model), expected)
    coded = [module for _, module in loaded.model.named_modules() if isinstance(module, QuantizedLinear)]
    assert len(coded) == (0 if "F" in kind else 22 if name == "llama" else 18)
    assert isinstance(loaded.model.embed_tokens, QuantizedEmbedding) == ("F" not in kind)
    assert not any(isinstance(module, QuantizedLinear) for _, module in floats.model.named_modules())


def test_without_a_dtype_weights_are_what_the_file_has(tmp_path):
    theirs = published("llama")
    for kind, dtype in {"F16": mx.float16, "BF16": mx.bfloat16, "Q4_1": mx.float16}.items():
        model = load_gguf(write_gguf_of(tmp_path / f"{kind}.gguf", theirs, "llama", kind=kind), log=quiet).model
        floats = {array.dtype for _, array in tree_flatten(model.parameters()) if array.dtype != mx.uint32}
        assert floats == {dtype}, kind


def test_codes_are_those_that_mlx_reads(tmp_path):
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        file = write_gguf_of(tmp_path / f"{kind}.gguf", published("qwen2"), "qwen2", kind=kind)
        theirs, _ = mx.load(str(file), return_metadata=True)
        ours = load_gguf(file, log=quiet).model
        for part in ("weight", "scales", "biases"):
            expected = theirs[f"blk.1.ffn_down.{part}"]
            found = getattr(ours.layers[1].mlp.down_proj, part)
            assert found.dtype == expected.dtype
            assert mx.array_equal(found, expected), (kind, part)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_transformers_opens_what_is_written(tmp_path, name):
    import transformers

    model = load_gguf(write_gguf_of(tmp_path / "model.gguf", published(name), name), log=quiet)
    write_gguf(tmp_path / "again.gguf", model.model, model.tokenizer, kind="f16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="again.gguf", dtype=torch.float32)
    ours = load_pretrained(tmp_path / "again.gguf", dtype=mx.float32)
    assert_close(logits(ours.model), their_logits(theirs.eval()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="again.gguf")
    text = "the quick brown fox, don't 12345\n\n  naïve"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == model.tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_blocks_are_those_of_ggml_s_reference(tmp_path, kind):
    model = load_gguf(write_gguf_of(tmp_path / "model.gguf", published("llama"), "llama"), log=quiet)
    counts = write_gguf(tmp_path / "coded.gguf", model.model, model.tokenizer, kind=kind)
    assert counts == ({"Q8_0": 23, "F32": 7} if kind == "q8_0" else {"Q8_0": 2, "Q4_0": 21, "F32": 7})
    _, floats = contents(tmp_path / "model.gguf")
    _, tensors = contents(tmp_path / "coded.gguf")
    for name, (stored, _, data) in tensors.items():
        expected = floats[name][2]
        if stored != "F32":
            expected = gguf.quantize(expected, gguf.GGMLQuantizationType[stored])
        assert np.array_equal(data, expected), name


def test_codes_that_were_trained_are_written_as_they_are(tmp_path):
    config = GPTConfig(vocab_size=V, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, intermediate_size=96)
    settings = QATConfig(weights="affine", bits=4, group_size=32)
    # Scales of float16 are what Q4_1 holds.
    model = convert_qat(prepare_qat(GPT(config, seed=3), settings), mx.float16).eval()
    source = load_gguf(write_gguf_of(tmp_path / "source.gguf", published("llama"), "llama"), log=quiet)
    counts = write_gguf(tmp_path / "model.gguf", model, source.tokenizer, kind="q4_0")
    assert counts["Q4_1"] == 15
    again = load_gguf(tmp_path / "model.gguf", log=quiet).model
    found = dict(tree_flatten(again.parameters()))
    for name, array in tree_flatten(model.parameters()):
        if "proj" in name:
            assert found[name].dtype == array.dtype
            assert mx.array_equal(found[name], array), name


def test_a_model_of_a_file_is_saved_as_a_folder(tmp_path):
    loaded = load_pretrained(write_gguf_of(tmp_path / "model.gguf", published("gemma3"), "gemma3"), log=quiet)
    assert loaded.family == "gemma3_text"
    save_pretrained(
        tmp_path / "folder", loaded.model, loaded.tokenizer, source=loaded.config, generation=loaded.generation
    )
    again = load_pretrained(tmp_path / "folder", log=quiet)
    assert loaded.model.config == read_shape(tmp_path / "model.gguf")
    assert mx.array_equal(again.model(mx.array(TOKENS)), loaded.model(mx.array(TOKENS)))
    text = "don't panic: naïve 12345"
    assert again.tokenizer.encode(text) == loaded.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_sinks": True}, "attention_sinks: True"),
        ({"sliding_window": 8}, "sliding_window: 8"),
        ({"norm": "layer_norm"}, "norm: layer_norm"),
        ({"embedding_scale": 2.0}, "embedding_scale: 2"),
        ({"attention_scale": 0.5}, "attention_scale: 0.5"),
        ({"position": "none"}, "position: none"),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 64, "beta_fast": 16.0}},
            "rope_scaling.beta_fast: 16.0 (must be 32.0)",
        ),
        ({"qk_norm": "joint"}, "qk_norm: joint"),
        ({"position": "learned", "norm": "layer_norm", "mlp": "gelu_tanh"}, "bias: False"),
        ({"post_norms": True, "norm_offset": True, "mlp": "geglu_tanh"}, "attention_softcap: null"),
    ],
)
def test_what_llama_cpp_would_not_compute_is_refused(changes, said):
    config = GPTConfig(**{"vocab_size": V, "hidden_size": 64, "num_heads": 4} | changes)
    with pytest.raises(HubError, match=r"must be one that llama.cpp's") as caught:
        config_keys(config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_written_where_something_is_or_that_does_not_fit(tmp_path):
    source = load_gguf(write_gguf_of(tmp_path / "model.gguf", published("llama"), "llama"), log=quiet)
    with pytest.raises(HubError, match=r"model.gguf exists"):
        write_gguf(tmp_path / "model.gguf", source.model, source.tokenizer, kind="f16")
    with pytest.raises(HubError, match="kind must be one of f32, f16, q8_0, q4_0 but got 'q4_k'"):
        write_gguf(tmp_path / "new.gguf", source.model, source.tokenizer, kind="q4_k")
    source.model.layers[1].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(HubError, match=r"layers.1.mlp.up_proj.weight must have values that F16 can hold but.* 1e.06"):
        write_gguf(tmp_path / "new.gguf", source.model, source.tokenizer, kind="f16")
    small = GPT(source.model.config.model_copy(update={"vocab_size": 100}))
    with pytest.raises(HubError, match="of at most 100 tokens, but has"):
        write_gguf(tmp_path / "new.gguf", small, source.tokenizer, kind="f16")
    prepared = prepare_qat(source.model, QATConfig(group_size=32))
    with pytest.raises(HubError, match=r"fake-quantised. Call convert_qat first"):
        write_gguf(tmp_path / "new.gguf", prepared, source.tokenizer, kind="f16")
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
