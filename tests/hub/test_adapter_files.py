"""Adapters that forge-mlx wrote open in mlx-lm, and those that mlx-lm trained open here: the same logits in both."""

import importlib
import json
from pathlib import Path

from forge_mlx.adapter import main
from forge_mlx.hub.adapter_files import load_adapters, module_places, save_adapters
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
from forge_mlx.models.adapters import AdapterConfig, adapted_layers, adapter_parameters, add_adapters, merge_adapters
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from taught_adapters import assert_alike, bases, opened, taught
from tiny_models import V, as_transformers_4

TOKENS = mx.array(np.random.default_rng(5).integers(0, V, (2, 9)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return bases(tmp_path_factory, as_transformers_4)


def in_mlx_lm(base, adapter=None):
    utils = importlib.import_module("mlx_lm.utils")
    model, _ = utils.load_model(base)
    if adapter is not None:
        utils.load_adapters(model, str(adapter))
    return model.eval()


CASES = {
    "lora": ("llama, biases", AdapterConfig(rank=3, alpha=5.0)),
    "dora": ("llama, biases", AdapterConfig(method="dora", rank=3, alpha=5.0)),
    "rslora": ("llama, biases", AdapterConfig(method="rslora", rank=3, alpha=5.0)),
    "tied table": ("llama, biases", AdapterConfig(rank=2, targets=["embed_tokens", "v_proj"], layers=2)),
    "table of a dora": ("llama, biases", AdapterConfig(method="dora", rank=2, targets=["embed_tokens"])),
    "head": ("llama", AdapterConfig(rank=2, targets=["lm_head", "*.mlp.*"], layers=1)),
    "uneven": ("llama", AdapterConfig(rank=2, targets=["layers.0.self_attn.q_proj", "layers.2.mlp.*"])),
    "gemma3": ("gemma3_text", AdapterConfig(rank=2)),
    "qwen3": ("qwen3", AdapterConfig(rank=2, method="dora", targets=["*_proj"])),
    "mixtral": ("mixtral", AdapterConfig(rank=2)),
    "qwen3_moe": ("qwen3_moe", AdapterConfig(rank=2)),
    "olmoe": ("olmoe", AdapterConfig(rank=2, targets=["layers.*.mlp.experts.*"], layers=2)),
}
FAST = ("uneven", "dora")


@pytest.mark.parametrize(
    "case", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_mlx_lm_opens_what_was_saved_and_so_do_we(tmp_path, folders, case):
    family, config = CASES[case]
    base = folders(family)
    model = taught(opened(base), config)
    plain, expected = opened(base)(TOKENS), model(TOKENS)
    assert mx.abs(expected - plain).max() > 0.1
    save_adapters(tmp_path / "adapters", model, config, str(base))
    assert_alike(in_mlx_lm(base, tmp_path / "adapters")(TOKENS), expected)
    again = opened(base)
    read = load_adapters(tmp_path / "adapters", again)
    assert mx.array_equal(again(TOKENS), expected)
    assert (read.method, read.rank, read.scale) == (config.method, config.rank, pytest.approx(config.scale))
    assert read.targets == [name for name, _ in adapted_layers(model)]


def test_keys_are_those_of_a_block_where_the_last_blocks_are_alike(tmp_path, folders):
    def written(config):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        save_adapters(folder, taught(opened(folders("llama")), config), config, "the-base")
        values = json.loads((folder / "adapter_config.json").read_text())
        assert (values["model"], values["fine_tune_type"]) == ("the-base", "lora")
        return values["num_layers"], values["lora_parameters"]["keys"]

    assert written(AdapterConfig(targets=["q_proj", "lm_head"], layers=2)) == (2, ["self_attn.q_proj", "lm_head"])
    assert written(AdapterConfig(targets=["layers.1.*.q_proj"])) == (2, ["model.layers.1.self_attn.q_proj"])
    assert written(AdapterConfig(targets=["lm_head"])) == (0, ["lm_head"])


@pytest.mark.slow
def test_adapters_over_codes_open_in_mlx_lm(tmp_path, folders):
    loaded = load_pretrained(folders("qwen3_moe"), log=lambda _: None)
    qat = QATConfig(group_size=32, overrides={"*.down_proj": None})
    convert_qat(prepare_qat(loaded.model, qat))
    base = tmp_path / "base"
    save_pretrained(base, loaded.model, loaded.tokenizer, source=loaded.config, log=lambda _: None)
    config = AdapterConfig(rank=2)
    model = taught(opened(base), config)
    save_adapters(tmp_path / "adapters", model, config, str(base))
    assert_alike(in_mlx_lm(base, tmp_path / "adapters")(TOKENS), model(TOKENS), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_what_mlx_lm_trained_opens_here(tmp_path, folders, method):
    base = folders("llama")
    model = in_mlx_lm(base)
    model.freeze()
    tuner, trainer = importlib.import_module("mlx_lm.tuner.utils"), importlib.import_module("mlx_lm.tuner.trainer")
    parameters = {"rank": 4, "scale": 3.0, "dropout": 0.0}
    tuner.linear_to_lora_layers(model, 2, parameters, use_dora=method == "dora")
    folder = tmp_path / "adapters"
    folder.mkdir()
    rows = [(list(map(int, row)), 0) for row in np.random.default_rng(1).integers(0, V, (8, 17))]
    trainer.train(
        model=model,
        args=trainer.TrainingArgs(
            batch_size=2, iters=6, steps_per_eval=100, max_seq_length=32, adapter_file=folder / "adapters.safetensors"
        ),
        optimizer=optim.Adam(0.01),
        train_dataset=rows,
        val_dataset=None,
    )
    config = {"fine_tune_type": method, "num_layers": 2, "lora_parameters": parameters, "model": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    ours = opened(base)
    plain = ours(TOKENS)
    read = load_adapters(folder, ours)
    assert (read.method, read.rank, read.alpha) == (method, 4, 12.0)
    assert len(adapted_layers(ours)) == 14
    expected = model.eval()(TOKENS)
    assert mx.abs(expected - plain).max() > 0.01
    assert_alike(ours(TOKENS), expected)


def edited(folder: Path, **changes):
    file = folder / "adapter_config.json"
    values = json.loads(file.read_text())
    for key, value in changes.items():
        target = values["lora_parameters"] if key in ("rank", "scale", "dropout") else values
        target[key] = value
    file.write_text(json.dumps(values))


def rewritten(folder: Path, change):
    file = folder / "adapters.safetensors"
    tensors = dict(mx.load(str(file)))
    mx.eval(tensors)
    change(tensors)
    mx.save_safetensors(str(file), tensors)


def renamed(tensors, old, new):
    for part in ("lora_a", "lora_b"):
        tensors[f"{new}.{part}"] = tensors.pop(f"{old}.{part}")


Q0 = "model.layers.0.self_attn.q_proj"
DAMAGE = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no weights": (lambda f: (f / "adapters.safetensors").unlink(), "has no adapters.safetensors"),
    "config is no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "must be JSON"),
    "cut short": (lambda f: (f / "adapters.safetensors").write_bytes(b"\x99\0\0\0\0\0\0\0{}"), "it is cut short"),
    "whole weights": (lambda f: edited(f, fine_tune_type="full"), "is full: it holds whole weights"),
    "unknown type": (lambda f: edited(f, fine_tune_type="ia3"), "must be lora or dora but got 'ia3'"),
    "no parameters": (lambda f: edited(f, lora_parameters=None), "lora_parameters must be an object"),
    "no scale": (lambda f: edited(f, scale=None), "lora_parameters.scale must be a number but got None"),
    "another rank": (lambda f: edited(f, rank=7), "lora_parameters.rank must be that of the tensors, 2, but got 7"),
    "bad dropout": (lambda f: edited(f, dropout=1.5), "describes no adapters: dropout"),
    "not dora": (
        lambda f: edited(f, fine_tune_type="dora"),
        f"{Q0} must have lora_a and lora_b and m but m is missing",
    ),
    "half": (lambda f: rewritten(f, lambda t: t.pop(f"{Q0}.lora_b")), f"{Q0} must have lora_a and lora_b but lora_b"),
    "other tensor": (
        lambda f: rewritten(f, lambda t: t.update({"model.norm.weight": mx.ones(3)})),
        "must end with lora_a or lora_b but there is model.norm.weight",
    ),
    "integers": (
        lambda f: rewritten(f, lambda t: t.update({f"{Q0}.lora_a": mx.zeros((32, 2), mx.int32)})),
        "must be floats but is int32",
    ),
    "other layer": (
        lambda f: rewritten(f, lambda t: renamed(t, Q0, "model.layers.9.self_attn.q_proj")),
        "there is one of model.layers.9.self_attn.q_proj, nearest to layers.",
    ),
    "other shape": (
        lambda f: rewritten(f, lambda t: t.update({f"{Q0}.lora_a": mx.zeros((16, 2))})),
        "layers.0.self_attn.q_proj.lora_a (16, 2) instead of (32, 2)",
    ),
    "two ranks": (
        lambda f: rewritten(
            f, lambda t: t.update({f"{Q0}.lora_a": mx.ones((32, 3)), f"{Q0}.lora_b": mx.ones((3, 32))})
        ),
        "all adapters must have one rank but there are 2 of",
    ),
    "ranks that do not meet": (
        lambda f: rewritten(f, lambda t: t.update({f"{Q0}.lora_a": mx.ones((32, 3))})),
        "must have one rank but lora_a is (32, 3) and lora_b is (2, 32)",
    ),
    "empty": (lambda f: rewritten(f, lambda t: t.clear()), "must hold adapters but is empty"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_one_clear_line_and_the_model_stays(tmp_path, folders, damage):
    change, message = DAMAGE[damage]
    config = AdapterConfig(rank=2, targets=["q_proj"])
    save_adapters(tmp_path / "a", taught(opened(folders("llama")), config), config, "base")
    change(tmp_path / "a")
    model = opened(folders("llama"))
    with pytest.raises(HubError) as error:
        load_adapters(tmp_path / "a", model)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert not adapted_layers(model)


def test_what_cannot_be_saved_is_an_error(tmp_path, folders):
    config = AdapterConfig(rank=2, targets=["q_proj"])
    model = opened(folders("llama"))
    with pytest.raises(HubError, match="model must have adapters but has none"):
        save_adapters(tmp_path / "a", model, config, "base")
    add_adapters(model, config, seed=0)
    with pytest.raises(HubError, match="config must be the one that the adapters were made with"):
        save_adapters(tmp_path / "a", model, AdapterConfig(rank=4), "base")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "something").touch()
    with pytest.raises(HubError, match="folder must be new or empty"):
        save_adapters(tmp_path / "a", model, config, "base")


@pytest.mark.slow
def test_gpt2_keeps_our_names_where_mlx_lm_has_one_layer_for_three(tmp_path, folders):
    model = opened(folders("gpt2"))
    places = module_places(model)
    assert places["layers.0.self_attn.q_proj"] == "model.layers.0.self_attn.q_proj"
    assert places["layers.0.mlp.up_proj"] == "model.h.0.mlp.c_fc"
    config = AdapterConfig(rank=2)
    taught(model, config)
    save_adapters(tmp_path / "a", model, config, "gpt2")
    again = opened(folders("gpt2"))
    load_adapters(tmp_path / "a", again)
    assert mx.array_equal(again(TOKENS), model(TOKENS))


@pytest.mark.slow
def test_the_command_merges_and_describes(tmp_path, folders, call_main):
    config, base = AdapterConfig(rank=2, method="dora"), folders("llama")
    model = taught(opened(base), config)
    save_adapters(tmp_path / "a", model, config, str(base))
    status, out, err = call_main(main, "merge", tmp_path / "a", tmp_path / "merged")
    assert (status, err.count("error")) == (0, 0)
    assert "21 adapters merged" in out
    expected = merge_and_call(model)
    assert_alike(opened(tmp_path / "merged")(TOKENS), expected, 1e-6)
    assert_alike(in_mlx_lm(tmp_path / "merged")(TOKENS), expected)
    status, out, _ = call_main(main, "info", tmp_path / "a")
    assert status == 0
    assert "dora, rank 2, scale 8, dropout 0" in out
    assert (
        f"{sum(array.size for array in adapter_parameters(taught(opened(base), config)).values()):,} parameters" in out
    )
    status, _, err = call_main(main, "merge", tmp_path / "a", tmp_path / "merged")
    assert (status, err.count("\n")) == (2, 1)
    assert "new or empty" in err


def merge_and_call(model):
    merge_adapters(model)
    return model(TOKENS)
