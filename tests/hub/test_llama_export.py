"""mlx-lm and transformers open what was exported: the same logits, the same tokens greedily, the same ids of text."""

import importlib

from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.native import load_model, save_model
from forge_mlx.hub.save import save_pretrained
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.moe import MoEConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.models.registry import build_model
from forge_mlx.nn import QuantizedEmbedding, QuantizedLinear
from forge_mlx.sampling import Sampler, generate_tokens
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_unflatten
import numpy as np
import pytest
import torch

# Importing mlx-lm takes seconds.
pytestmark = pytest.mark.slow

CORPUS = "".join(f"def größe_{i}(x):\n    return x + {i}  # 🙂 </s>\n" for i in range(300))
TEXT = CORPUS[:200]
PROMPTS = ("def größe_7(x):\n    return  x", "a", "  # 🙂 ", "x + ", "return def (1")
SHAPE = {"vocab_size": 400, "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 128}
# Matrices of this size make logits of about 5, which no rounding brings close to each other.
SPREAD = {**SHAPE, "init_std": 0.2}
MODELS = {
    "llama": GPTConfig(**SPREAD),
    "llama, everything else": GPTConfig(
        **SPREAD, bias=True, rope_scale=0.3, rope_base=5e4, norm_eps=0.1, tie_embeddings=False, intermediate_size=128
    ),
    "qwen3": GPTConfig(**SPREAD, qk_norm=True, head_dim=32, norm_eps=0.1),
    "mixtral": MoEConfig(**SPREAD, num_experts=5, experts_per_token=3, expert_intermediate_size=64),
    "qwen3_moe": MoEConfig(
        **SPREAD,
        **{"num_experts": 5, "qk_norm": True, "normalize_gates": False, "dense_layers": 1},
        **{"intermediate_size": 128, "expert_intermediate_size": 64, "tie_embeddings": False, "head_dim": 32},
    ),
}
FORMATS = {
    "affine 4 bits": QATConfig(bits=4, group_size=64),
    "affine 4 bits, table 8, a layer float": QATConfig(
        bits=4, group_size=64, overrides={"embed_tokens": {"bits": 8}, "layers.1.mlp*": None}
    ),
    "affine 2 bits in groups of 32": QATConfig(bits=2, group_size=32),
    "mxfp4": QATConfig(weights="mxfp4"),
    "mxfp8": QATConfig(weights="mxfp8"),
    "nvfp4": QATConfig(weights="nvfp4"),
    "ternary": QATConfig(weights="ternary"),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([CORPUS], kind="bpe", vocab_size=400)


@pytest.fixture(scope="module")
def peers():
    """The modules mlx_lm and transformers."""
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")
    return mlx_lm, importlib.import_module("transformers")


def build(config, dtype=mx.float32):
    """A model whose norms and biases are not what they start as."""
    model = build_model(config, seed=3)
    keys = iter(mx.random.split(mx.random.key(4), 999))
    model.update(
        tree_map(lambda a: (a + 0.1 * mx.random.normal(a.shape, key=next(keys))).astype(dtype), model.parameters())
    )
    model.eval()
    return model


def rounded(model):
    """The float model of the weights that a converted model's codes stand for."""
    weights = {}
    for name, module in model.named_modules():
        parameters = dict(module.items())
        if "scales" in parameters:
            weights[f"{name}.weight"] = module.effective_weight()
            weights |= {f"{name}.bias": module.bias} if "bias" in parameters else {}
        else:
            weights |= {f"{name}.{key}": value for key, value in parameters.items() if isinstance(value, mx.array)}
    floats = build_model(model.config)
    floats.update(tree_unflatten(list(weights.items())))
    floats.eval()
    return floats


def in_float64(transformers, folder, tokenizer):
    """Logits of PyTorch's implementation."""
    # The products of experts that it takes by default have no float64.
    kind = {"experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kind).double()
    with torch.no_grad():
        return model(torch.tensor([tokenizer.encode(TEXT)])).logits.numpy()


def errors(truth, *logits):
    """How far each is off, as a part of the largest logit."""
    return [np.abs(np.array(each.astype(mx.float32)) - truth).max() / np.abs(truth).max() for each in logits]


def assert_same_logits(model, theirs, tokenizer, truth):
    tokens = mx.array([tokenizer.encode(TEXT)])
    ours, found = errors(truth, model(tokens), theirs(tokens))
    assert ours <= 1e-5
    assert found <= 2 * ours + 1e-5


def assert_same_tokens(mlx_lm, model, tokenizer, folder):
    """50 tokens greedily behind each of some texts, each with its own tokenizer and cache."""
    theirs, their_tokenizer = mlx_lm.load(str(folder))
    generate = importlib.import_module("mlx_lm.generate").stream_generate
    # A model of random weights may choose the end token at any time.
    their_tokenizer.eos_token_ids = []
    seen = set()
    for prompt in PROMPTS:
        expected = list(generate_tokens(model, tokenizer.encode(prompt), Sampler(0), 50, stop=frozenset()))
        found = list(generate(theirs, their_tokenizer, prompt, max_tokens=50))
        assert [piece.token for piece in found] == expected
        text = tokenizer.decode(expected)
        if tokenizer.end_id not in expected and "\ufffd" not in text:
            assert "".join(piece.text for piece in found) == text
        seen |= set(expected)
    assert len(seen) > 10
    return theirs


@pytest.mark.parametrize("name", MODELS)
def test_a_float_model(peers, tokenizer, tmp_path, name):
    mlx_lm, transformers = peers
    model = build(MODELS[name])
    save_pretrained(tmp_path, model, tokenizer)
    theirs = assert_same_tokens(mlx_lm, model, tokenizer, tmp_path)
    assert_same_logits(model, theirs, tokenizer, in_float64(transformers, tmp_path, tokenizer))


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        *(("llama", format_name) for format_name in FORMATS),
        *((name, "affine 4 bits") for name in MODELS if name != "llama"),
        ("llama, everything else", "affine 4 bits, table 8, a layer float"),
        ("llama, everything else", "mxfp4"),
        ("qwen3_moe", "mxfp8"),
        ("qwen3_moe", "ternary"),
    ],
)
def test_a_model_trained_quantised(peers, tokenizer, tmp_path, name, format_name):
    mlx_lm, transformers = peers
    model = prepare_qat(build(MODELS[name]), FORMATS[format_name])
    convert_qat(model)
    model.eval()
    save_pretrained(tmp_path / "codes", model, tokenizer)
    save_pretrained(tmp_path / "floats", rounded(model), tokenizer)
    theirs = assert_same_tokens(mlx_lm, model, tokenizer, tmp_path / "codes")
    assert_same_logits(model, theirs, tokenizer, in_float64(transformers, tmp_path / "floats", tokenizer))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_of_which_some_are_quantised(peers, tokenizer, tmp_path, name):
    mlx_lm, transformers = peers
    model = prepare_qat(build(MODELS[name]), QATConfig(modules=["*.experts.*"], overrides={"*.1.*.up_proj": None}))
    convert_qat(model)
    model.eval()
    save_pretrained(tmp_path / "codes", model, tokenizer)
    save_pretrained(tmp_path / "floats", rounded(model), tokenizer)
    theirs = assert_same_tokens(mlx_lm, model, tokenizer, tmp_path / "codes")
    assert_same_logits(model, theirs, tokenizer, in_float64(transformers, tmp_path / "floats", tokenizer))


def test_a_model_that_mlx_quantised(peers, tokenizer, tmp_path):
    model = build(MODELS["llama"])
    nn.quantize(model, 64, 4)
    save_pretrained(tmp_path, model, tokenizer)
    theirs = assert_same_tokens(peers[0], model, tokenizer, tmp_path)
    tokens = mx.array([tokenizer.encode(TEXT)])
    np.testing.assert_allclose(np.array(theirs(tokens)), np.array(model(tokens)), rtol=0, atol=1e-4)
    assert isinstance(theirs.model.embed_tokens, nn.QuantizedEmbedding)


@pytest.mark.parametrize("quantised", [False, True], ids=["float", "4 bits"])
def test_bfloat16(peers, tokenizer, tmp_path, quantised, monkeypatch):
    mlx_lm, transformers = peers
    model = build(MODELS["llama"])
    if quantised:
        model = convert_qat(prepare_qat(model, FORMATS["affine 4 bits"]), mx.bfloat16)
    else:
        model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    assert save_pretrained(tmp_path / "out", model, tokenizer)["dtype"] == "bfloat16"
    theirs, _ = mlx_lm.load(str(tmp_path / "out"))
    save_pretrained(tmp_path / "floats", rounded(model), tokenizer)
    truth = in_float64(transformers, tmp_path / "floats", tokenizer)
    tokens = mx.array([tokenizer.encode(TEXT)])
    assert model(tokens).dtype == theirs(tokens).dtype == mx.bfloat16
    # With MLX's own products, which on a CPU sum in 16 bits: ours of many rows are more exact.
    monkeypatch.setattr(QuantizedLinear, "__call__", nn.QuantizedLinear.__call__)
    monkeypatch.setattr(QuantizedEmbedding, "as_linear", nn.QuantizedEmbedding.as_linear)
    ours, found = errors(truth, model(tokens), theirs(tokens))
    assert found <= 2 * ours + 1e-2


def test_through_forges_own_folder(peers, tokenizer, tmp_path):
    model = prepare_qat(build(MODELS["llama"]), FORMATS["affine 4 bits"])
    convert_qat(model)
    (tmp_path / "native").mkdir()
    save_model(tmp_path / "native", model, tokenizer)
    loaded, its_tokenizer = load_model(tmp_path / "native")
    save_pretrained(tmp_path / "out", loaded, its_tokenizer)
    assert_same_tokens(peers[0], model, tokenizer, tmp_path / "out")


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("end_first", [False, True], ids=["texts", "texts behind the end token"])
def test_the_tokenizer_that_is_opened(peers, tokenizer, tmp_path, name, end_first):
    mlx_lm, transformers = peers
    save_pretrained(tmp_path, build(MODELS[name]), tokenizer, texts_begin_with_end=end_first)
    opened = mlx_lm.load(str(tmp_path))[1]
    assert opened.eos_token_ids == {tokenizer.end_id}
    for text in (
        *CORPUS[:400].split("#"),
        "</s> <unk> <0x41>",
        "a , b . don 't",
        "a\u2581 b",
        "",
        "\n\n\t  ",
        "👩‍👩‍👧‍👦",
    ):
        expected = tokenizer.encode(text)
        for each in (opened, transformers.AutoTokenizer.from_pretrained(tmp_path)):
            assert each.encode(text) == [tokenizer.end_id] * end_first + expected
            assert each.encode(text, add_special_tokens=False) == expected
            assert each.decode(expected) == text
            assert each.decode([*expected, tokenizer.end_id], skip_special_tokens=True) == text


def test_transformers_does_not_take_codes_for_weights(peers, tokenizer, tmp_path):
    save_pretrained(tmp_path, convert_qat(prepare_qat(build(MODELS["llama"]), QATConfig())), tokenizer)
    with pytest.raises(ValueError, match="quantization config"):
        peers[1].AutoModelForCausalLM.from_pretrained(tmp_path)
