"""Adapters of routers, which mlx-lm's training makes by default: read here, the model computes what mlx-lm's does."""

import importlib
import json

from forge_mlx.adapter import main
from forge_mlx.hub.adapter_files import load_adapters, save_adapters
from forge_mlx.hub.errors import HubError
from forge_mlx.models.adapters import adapted_layers, add_adapters
import mlx.core as mx
from mlx.utils import tree_flatten
import numpy as np
import pytest
from taught_adapters import assert_alike, bases, opened
from tiny_models import V, as_transformers_4

TOKENS = mx.array(np.random.default_rng(5).integers(0, V, (2, 9)))
PLACES = {"mixtral": "block_sparse_moe.gate", "qwen3_moe": "mlp.gate", "olmoe": "mlp.gate"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return bases(tmp_path_factory, as_transformers_4)


def trained_by_mlx_lm(base, folder, *, method="lora", keys=None):
    """A folder of adapters of two blocks as mlx_lm.lora writes it, and the logits of mlx-lm's model with them.

    Args:
        base: The model's folder.
        folder: Where to.
        method: "lora" or "dora".
        keys: Modules of a block; None: what mlx-lm takes by default.
    """
    utils, tuner = importlib.import_module("mlx_lm.utils"), importlib.import_module("mlx_lm.tuner.utils")
    model, _ = utils.load_model(base)
    model.freeze()
    parameters = {"rank": 3, "scale": 2.0, "dropout": 0.0, **({} if keys is None else {"keys": keys})}
    tuner.linear_to_lora_layers(model, 2, parameters, use_dora=method == "dora")
    rng = np.random.default_rng(3)
    tensors = {
        name: mx.array(np.array(array) * 1.3 if name.endswith(".m") else rng.standard_normal(array.shape) * 0.2)
        for name, array in tree_flatten(model.trainable_parameters())
    }
    tensors = {name: array.astype(mx.float32) for name, array in tensors.items()}
    model.load_weights(list(tensors.items()), strict=False)
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": method, "num_layers": 2, "lora_parameters": parameters, "model": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return model.eval()(TOKENS)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize(
    "family", [name if name == "olmoe" else pytest.param(name, marks=pytest.mark.slow) for name in PLACES]
)
def test_the_model_computes_what_mlx_lm_does(tmp_path, folders, family, method):
    base = folders(family)
    # mlx-lm has no DoRA of experts.
    keys = None if method == "lora" else [PLACES[family], "self_attn.q_proj"]
    expected = trained_by_mlx_lm(base, tmp_path / "a", method=method, keys=keys)
    ours, lines = opened(base), []
    plain, routers = ours(TOKENS), [ours.layers[i].mlp.router.weight for i in (-2, -1)]
    read = load_adapters(tmp_path / "a", ours, log=lines.append)
    assert lines == [f"{tmp_path / 'a'}: 2 adapters of routers merged into their weights: routers take none"]
    assert [mx.abs(ours.layers[i].mlp.router.weight - routers[i]).max().item() > 0.05 for i in (-2, -1)] == [True] * 2
    assert mx.abs(expected - plain).max() > 0.1
    assert_alike(ours(TOKENS), expected)
    assert len(read.targets) == len(adapted_layers(ours)) + 2
    assert not any("router" in name for name, _ in tree_flatten(ours.trainable_parameters()))


def test_nothing_is_trained_or_saved_further(tmp_path, folders):
    trained_by_mlx_lm(folders("olmoe"), tmp_path / "a", keys=["mlp.gate", "self_attn.q_proj"])
    model = opened(folders("olmoe"))
    config = load_adapters(tmp_path / "a", model, log=lambda _: None)
    with pytest.raises(HubError, match=r"routers take no adapters, so .* merged, but the config names layers.1.mlp.ro"):
        save_adapters(tmp_path / "b", model, config, "base")
    with pytest.raises(ValueError, match=r"layers.1.mlp.router is a Router, which takes none"):
        add_adapters(opened(folders("olmoe")), config, seed=0)


def test_what_does_not_fit_leaves_the_model(tmp_path, folders):
    model = opened(folders("olmoe"))
    before = model(TOKENS)
    trained_by_mlx_lm(folders("olmoe"), tmp_path / "a", keys=["mlp.gate"])
    with pytest.raises(HubError, match="there must be adapters of other layers than routers but all are of routers"):
        load_adapters(tmp_path / "a", model)
    trained_by_mlx_lm(folders("olmoe"), tmp_path / "b", keys=["mlp.gate", "self_attn.q_proj"])
    file = tmp_path / "b" / "adapters.safetensors"
    tensors = dict(mx.load(str(file)))
    mx.eval(tensors)
    tensors["model.layers.1.mlp.gate.lora_b"] = mx.zeros((3, 5))
    mx.save_safetensors(str(file), tensors)
    with pytest.raises(HubError, match=r"layers.1.mlp.router.lora_b \(3, 5\) instead of \(3, 6\)"):
        load_adapters(tmp_path / "b", model)
    assert mx.array_equal(model(TOKENS), before)
    assert not adapted_layers(model)


@pytest.mark.slow
def test_the_command_merges_them(tmp_path, folders, call_main):
    expected = trained_by_mlx_lm(folders("qwen3_moe"), tmp_path / "a")
    status, _, err = call_main(main, "merge", tmp_path / "a", tmp_path / "merged")
    assert (status, "2 adapters of routers merged" in err) == (0, True)
    assert_alike(opened(tmp_path / "merged")(TOKENS), expected)
    assert_alike(importlib.import_module("mlx_lm.utils").load_model(tmp_path / "merged")[0](TOKENS), expected)
