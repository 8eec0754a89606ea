"""Checkpoints that mlx-lm quantised compute here what they compute there, and open there again from here."""

import importlib
import json

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
from forge_mlx.nn import QuantizedEmbedding, QuantizedLinear
from forge_mlx.nn.coded import Coded
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import numpy as np
import pytest
from tiny_models import IGNORES_WINDOWS, WINDOW, V, as_transformers_4, published, save

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(6).integers(0, V, (2, 3 * WINDOW))
FORMAT, Q_PROJ = {"bits": 4, "group_size": 32}, "model.layers.0.self_attn.q_proj"
FAMILIES = ("llama", "llama, biases", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral", "olmoe", "qwen3_moe", "dots1")
# mlx-lm quantises routers of Qwen3-MoE in 8 bits, those of others like everything else, and of dots1 none.
ROUTERS = {"mixtral": 3, "olmoe": 3, "qwen3_moe": 2}


def quiet(line: str) -> None:
    raise AssertionError(line)


def mlx_lm():
    return importlib.import_module("mlx_lm.utils")


def quantised(folder, name, mode="affine", bits=4, group_size=32, predicate=None):
    """A folder that mlx-lm quantised of what transformers (of GPT-2: we, without a prefix) had saved."""
    source = save(published(name), folder / "float")
    if name == "gpt2":
        opened = load_pretrained(source, log=quiet)
        source = folder / "without a prefix"
        save_pretrained(source, opened.model, opened.tokenizer, source=opened.config)
    as_transformers_4(source)
    config = json.loads((source / "config.json").read_text())
    config.setdefault("dtype", config.get("torch_dtype"))
    (source / "config.json").write_text(json.dumps(config))
    importlib.import_module("mlx_lm.convert").convert(
        str(source),
        str(folder / "codes"),
        quantize=True,
        q_mode=mode,
        q_bits=bits,
        q_group_size=group_size,
        quant_predicate=predicate,
        dtype="float32",
    )
    return folder / "codes"


def assert_same_logits(name, ours, folder):
    family = name.split(",")[0]
    tokens = mx.array(TOKENS[:, :WINDOW] if family in IGNORES_WINDOWS else TOKENS)
    theirs, _ = mlx_lm().load_model(folder)
    expected = np.array(theirs(tokens))
    found = np.array(ours(tokens).astype(mx.float32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(tmp_path, name):
    folder, lines = quantised(tmp_path, name), []
    opened = load_pretrained(folder, log=lines.append)
    said = f"{folder}: {ROUTERS.get(name)} routers in codes were made floats, as they are in every model here"
    assert lines == ([said] if name in ROUTERS else [])
    coded = [name for name, module in opened.model.named_modules() if isinstance(module, Coded)]
    assert {"embed_tokens", "layers.0.self_attn.q_proj"} <= set(coded)
    if not opened.model.config.tie_embeddings:
        assert "lm_head" in coded
    assert_same_logits(name, opened.model, folder)
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, source=opened.config, log=lines.append)
    assert_same_logits(name, opened.model, tmp_path / "ours")
    again = load_pretrained(tmp_path / "ours", log=quiet)
    assert mx.array_equal(again.model(mx.array(TOKENS)), opened.model(mx.array(TOKENS)))


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_formats_with_scales_of_a_byte(tmp_path, mode, bits, group_size):
    folder = quantised(tmp_path, "llama", mode, bits, group_size)
    opened = load_pretrained(folder, log=quiet)
    assert opened.model.layers[0].self_attn.q_proj.mode == mode
    assert_same_logits("llama", opened.model, folder)
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, source=opened.config)
    assert_same_logits("llama", opened.model, tmp_path / "ours")


def test_formats_of_single_layers(tmp_path):
    def predicate(path, _module):
        if path.endswith("v_proj"):
            return {"group_size": 32, "bits": 8, "mode": "affine"}
        return "embed_tokens" not in path and "layers.1" not in path

    folder = quantised(tmp_path, "llama", predicate=predicate)
    entries = json.loads((folder / "config.json").read_text())["quantization"]
    assert entries["model.layers.0.self_attn.v_proj"]["bits"] == 8
    model = load_pretrained(folder, log=quiet).model
    layer = model.layers[2].self_attn
    assert (layer.v_proj.bits, layer.k_proj.bits) == (8, 4)
    assert not isinstance(model.embed_tokens, QuantizedEmbedding)
    assert not isinstance(model.layers[1].self_attn.q_proj, QuantizedLinear)
    assert_same_logits("llama", model, folder)


def test_in_sixteen_bits_codes_stay_and_scales_are_rounded(tmp_path):
    folder = quantised(tmp_path, "llama")
    exact = load_pretrained(folder, log=quiet).model.layers[0].self_attn.q_proj
    layer = load_pretrained(folder, dtype=mx.bfloat16, log=quiet).model.layers[0].self_attn.q_proj
    assert mx.array_equal(layer.weight, exact.weight)
    assert mx.array_equal(layer.scales, exact.scales.astype(mx.bfloat16))
    assert layer.effective_weight().dtype == mx.bfloat16


def test_codes_are_frozen_and_a_layer_beside_them_learns(tmp_path):
    model = load_pretrained(quantised(tmp_path, "llama"), log=quiet).model
    coded = {name for name, module in model.named_modules() if isinstance(module, Coded)}
    model.unfreeze()
    trainable = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert not {name for name in trainable if name.rpartition(".")[0] in coded}

    def loss(model):
        return nn.losses.cross_entropy(model(mx.array(TOKENS))[:, :-1], mx.array(TOKENS[:, 1:]), reduction="mean")

    value, gradients = nn.value_and_grad(model, loss)(model)
    assert np.isfinite(value.item())
    assert all(mx.abs(array).max().item() > 0 for _, array in tree_flatten(gradients))


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    return quantised(tmp_path_factory.mktemp("codes"), "llama")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}, "quantization": None},
            "quantization_config must be mlx-lm's, with group_size, bits and mode, but is of 'gptq'. Get the float",
        ),
        ({"quantization": 4}, "quantization must be an object but got 4."),
        (
            {"quantization": {"bits": 7, "group_size": 32}},
            "quantization: bits must be 4, 2, 3, 5, 6 or 8 in the mode 'affine' but got 7",
        ),
        (
            {"quantization": {"bits": 4, "group_size": 32, "mode": "int3"}},
            "quantization.mode must be among affine, mxfp4",
        ),
        ({"quantization": {"bits": 4, "group_size": 32, "axis": 1}}, "quantization.axis must be an object, true or fa"),
        (
            {
                "quantization": {
                    "bits": 4,
                    "group_size": 32,
                    "model.layers.0.self_attn.q_proj": {"bits": 8, "group_size": 32},
                }
            },
            "layers.0.self_attn.q_proj: codes must be of the format that quantization says, affine of 8 bits in groups "
            "of 32, but have 4 bits in groups of 32, affine.",
        ),
        (
            {"quantization": {**FORMAT, Q_PROJ: False}},
            "2 that nothing needs: layers.0.self_attn.q_proj.biases; layers.0.self_attn.q_proj.scales",
        ),
        ({"quantization": None, "quantization_config": None}, " that nothing needs: embed_tokens.biases; "),
    ],
    ids=["gptq", "no object", "bits", "mode", "key", "other bits", "said to be float", "says nothing"],
)
def test_what_config_json_says_wrongly(codes, tmp_path, change, message):
    for file in codes.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((codes / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HubError) as caught:
        load_pretrained(tmp_path, log=quiet)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
