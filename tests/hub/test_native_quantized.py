"""Model folders of layers of codes: what is written is what is read, and computes the same."""

import json

from forge_mlx.generate import main
from forge_mlx.hub.native import ModelFolderError, load_model, save_model
from forge_mlx.kernels.quantize.options import MODES
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat, set_fake_quant
from forge_mlx.nn import Linear, QuantizedLinear
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import numpy as np
import pytest
from tiny_bpe import tiny_bpe

SHAPE = {"vocab_size": 300, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
GPT_CONFIG = GPTConfig(**SHAPE, tie_embeddings=False, bias=True)
MOE_CONFIG = MoEConfig(**SHAPE, num_experts=4, shared_experts=1, dense_layers=1, selection_bias=True)
TOKENS = mx.array([[1, 2, 3, 299]])


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_bpe()


def converted(model, dtype=None, **settings):
    settings = {"weights": "affine", "group_size": 32} | settings
    return convert_qat(prepare_qat(model, QATConfig(**settings)), dtype).eval()


@pytest.fixture
def folder(tmp_path, tokenizer):
    path = tmp_path / "model"
    path.mkdir()
    save_model(path, converted(GPT(GPT_CONFIG, seed=3), overrides={"*.v_proj": None}), tokenizer)
    return path


def error(path):
    with pytest.raises(ModelFolderError) as caught:
        load_model(path)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [None, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", [(GPT, GPT_CONFIG), (MoE, MOE_CONFIG)], ids=["gpt", "moe"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_saved_loads_again(tmp_path, tokenizer, mode, model, dtype):
    kind, config = model
    group = {"group_size": 32 if mode == "affine" else None}
    written = converted(kind(config, seed=3), dtype, weights=mode, activations="int8", **group)
    save_model(tmp_path, written, tokenizer)
    loaded, _ = load_model(tmp_path)
    assert type(loaded) is kind
    assert loaded.config == config
    assert not any(module.training for module in loaded.modules())
    assert repr(loaded) == repr(written)
    saved, found = dict(tree_flatten(written.parameters())), dict(tree_flatten(loaded.parameters()))
    assert saved.keys() == found.keys()
    for name, array in saved.items():
        assert found[name].dtype == array.dtype, name
        assert mx.array_equal(array, found[name]), name
    assert mx.array_equal(loaded(TOKENS), written(TOKENS))
    # Codes and scales are frozen as before, so that adapters alone would be trained.
    assert list(tree_flatten(loaded.trainable_parameters())) != list(tree_flatten(loaded.parameters()))
    assert loaded.layers[0].self_attn.q_proj.trainable_parameters() == {}


def test_the_config_says_what_each_layer_is(folder):
    values = json.loads((folder / "config.json").read_text())["quantization"]
    assert values["layers.1.mlp.up_proj"] == {
        "layer": "QuantizedLinear",
        "mode": "affine",
        "bits": 4,
        "group_size": 32,
        "dtype": "float32",
    }
    assert values["embed_tokens"]["layer"] == "QuantizedEmbedding"
    assert len(values) == 2 + 2 * 6
    assert "layers.0.self_attn.v_proj" not in values
    model, _ = load_model(folder)
    assert type(model.layers[0].self_attn.v_proj) is Linear
    assert isinstance(model.layers[0].self_attn.k_proj, QuantizedLinear)


def test_float_folders_say_nothing_of_it(tmp_path, tokenizer):
    save_model(tmp_path, MoE(MOE_CONFIG, seed=3), tokenizer)
    assert "quantization" not in json.loads((tmp_path / "config.json").read_text())
    model, _ = load_model(tmp_path)
    assert mx.array_equal(model(TOKENS), MoE(MOE_CONFIG, seed=3).eval()(TOKENS))


def test_a_folder_of_codes_continues_a_prompt(folder, call_main):
    status, out, err = call_main(main, folder, "--prompt", "def ", "--max-tokens", 5, "--temperature", 0)
    assert (status, err) == (0, f"[{folder}]\n")
    assert out.startswith("def ")


def test_a_prepared_model_is_not_saved_as_if_it_were_float(tmp_path, tokenizer):
    model = prepare_qat(GPT(GPT_CONFIG, seed=3), QATConfig(group_size=32))
    with pytest.raises(
        ValueError, match=r"\[save_model\] the model must be converted .* embed_tokens is a FakeQuantEmb"
    ):
        save_model(tmp_path, model, tokenizer)
    assert list(tmp_path.iterdir()) == []
    # Switched off it computes what the float model computes.
    set_fake_quant(model, False)
    save_model(tmp_path, model, tokenizer)
    assert mx.array_equal(load_model(tmp_path)[0](TOKENS), model(TOKENS))


def test_layers_of_mlx_s_own_quantiser_are_refused(tmp_path, tokenizer):
    model = GPT(GPT_CONFIG, seed=3)
    nn.quantize(model, 32, 4)
    with pytest.raises(
        ValueError, match=r"\[save_model\] layers must be floating or of convert_qat but embed_tokens is a Q"
    ):
        save_model(tmp_path, model, tokenizer)


NAME = "layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        (NAME, 4, f"{NAME}: Input should be a valid dictionary or instance of CodedLayer."),
        (NAME, {"mode": "int3"}, f"{NAME}.mode: Input should be 'affine', 'mxfp4'"),
        (
            NAME,
            {"bits": 7},
            f"{NAME}: Value error, [quantization] bits must be 4, 2, 3, 5, 6 or 8 in the mode 'affine'",
        ),
        (NAME, {"extra": 1}, f"{NAME}.extra: Extra inputs are not permitted."),
        (NAME, {"dtype": "int8"}, f"{NAME}.dtype: Input should be 'float32', 'float16' or 'bfloat16'."),
        (NAME, {"layer": "CodesLinear"}, f"{NAME}.layer: must be QuantizedLinear here but got 'CodesLinear'."),
        (
            NAME,
            {"group_size": 128},
            f"{NAME}: the last axis of the weight must be a multiple of 128 but it is (64, 32).",
        ),
        ("layers.7.mlp", {}, "layers.7.mlp: the model has no such layer."),
        ("norm", {}, "norm: a RMSNorm has no matrix that could be in codes."),
        ("layers.0", {}, "layers.0: a Block has no matrix that could be in codes."),
    ],
)
def test_an_entry_that_fits_nothing(folder, name, entry, message):
    file = folder / "config.json"
    values = json.loads(file.read_text())
    good = values["quantization"][NAME]
    values["quantization"][name] = good | entry if isinstance(entry, dict) else entry
    file.write_text(json.dumps(values))
    assert error(folder).startswith(f"{file}: quantization.{message}")


def test_an_entry_for_a_router(tmp_path, tokenizer):
    save_model(tmp_path, converted(MoE(MOE_CONFIG, seed=3)), tokenizer)
    file, router = tmp_path / "config.json", "layers.1.mlp.router"
    values = json.loads(file.read_text())
    values["quantization"][router] = values["quantization"]["layers.0.mlp.up_proj"]
    file.write_text(json.dumps(values))
    assert error(tmp_path).startswith(f"{file}: quantization.{router}: a Router has no matrix that could be in codes.")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quantization", 3, "quantization must name layers but got 3."),
        ("arch", "rnn", "arch must be one of gpt, moe but got 'rnn'."),
        ("arch", ["gpt"], "arch must be one of gpt, moe but got ['gpt']."),
        ("arch", "moe", "describes no MoE: num_heads: Input should be a valid integer."),
    ],
)
def test_a_wrong_config(folder, key, value, message):
    file = folder / "config.json"
    values = json.loads(file.read_text()) | {key: value}
    if value == "moe":
        values["num_heads"] = "two"
    file.write_text(json.dumps(values))
    assert error(folder) == f"{file}: {message}"


@pytest.mark.parametrize("change", ["missing", "float", "bits"])
def test_arrays_that_do_not_fit_the_entries(folder, change):
    """Entries without codes, codes without an entry, and codes of another number of bits."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    if change == "missing":
        del values["quantization"]
    elif change == "float":
        values["quantization"]["layers.0.self_attn.v_proj"] = values["quantization"][NAME]
    else:
        values["quantization"][NAME]["bits"] = 2
    file.write_text(json.dumps(values))
    assert error(folder).startswith(f"{folder / 'model.safetensors'}: is damaged or of another model: ")


def test_codes_of_another_dtype_are_found(folder):
    arrays = mx.load(str(folder / "model.safetensors"))
    arrays[f"{NAME}.weight"] = arrays[f"{NAME}.weight"].astype(mx.int32)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    assert error(folder) == (
        f"{folder / 'model.safetensors'}: is damaged or of another model: {NAME}.weight must be uint32 but is int32."
    )


def test_the_codes_in_the_file_are_those_of_quantize(folder):
    arrays = mx.load(str(folder / "model.safetensors"))
    weight = GPT(GPT_CONFIG, seed=3).layers[0].mlp.up_proj.weight
    assert np.array(arrays[f"{NAME}.weight"]).dtype == np.uint32
    values = mx.dequantize(*(arrays[f"{NAME}.{part}"] for part in ("weight", "scales", "biases")), 32, 4)
    low, high = np.array(weight).reshape(64, 1, 32).min(axis=-1), np.array(weight).reshape(64, 1, 32).max(axis=-1)
    assert (np.abs(np.array(values - weight)) <= (high - low) / 15).all()
