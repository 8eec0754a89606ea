"""Adapters in a model: where they go, what they train and leave alone, merging to the bit, and quantised training."""

from forge_mlx.data.batch import Batch
from forge_mlx.kernels import quantize
from forge_mlx.models.adapters import (
    AdapterConfig,
    adapted_layers,
    adapter_parameters,
    adapters_disabled,
    add_adapters,
    merge_adapters,
    unmerge_adapters,
)
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.moe import MoEConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.models.registry import build_model
from forge_mlx.nn import Linear, QuantizedLinear, cross_entropy
from forge_mlx.nn.adapted_base import float_weight
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.nn.qat_lora import FakeQuantAdapter
from forge_mlx.optim import OptimConfig, build_optimizer
from forge_mlx.train.step import TrainStep
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
import numpy as np
from pydantic import ValidationError
import pytest

SHAPE = {"vocab_size": 33, "num_layers": 3, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2}
LLAMA = {**SHAPE, "intermediate_size": 128}
UNTIED = {**LLAMA, "tie_embeddings": False}
MOE = {**LLAMA, "arch": "moe", "num_experts": 4, "shared_experts": 1, "dense_layers": 1, "selection_bias": True}
GPT2 = {**SHAPE, "num_kv_heads": 4, "norm": "layer_norm", "position": "learned", "bias": True, "mlp": "gelu"}
FAMILIES = {"llama": LLAMA, "untied": UNTIED, "gpt2": GPT2, "moe": MOE}
TOKENS = mx.array(np.random.default_rng(0).integers(0, 33, (2, 7)).astype(np.int32))
ALL = ["*"]


def build(settings=LLAMA, dtype=mx.float32):
    """A model whose matrices matter."""
    model = build_model((MoEConfig if settings.get("arch") == "moe" else GPTConfig)(**settings, init_std=0.2))
    model.set_dtype(dtype)
    return model.eval()


def coded(settings=LLAMA, **options):
    return convert_qat(prepare_qat(build(settings), QATConfig(**options)))


def taught(model, seed=5):
    """The model with adapters that do something; magnitudes stay near the norms."""
    rng = np.random.default_rng(seed)
    arrays = []
    for name, array in named_arrays(model.trainable_parameters()):
        value = rng.standard_normal(array.shape) * 0.1
        start = np.array(array.astype(mx.float32)) if name.endswith(".m") else 0
        arrays.append((name, mx.array(start + value, array.dtype)))
    model.update(tree_unflatten(arrays))
    return model


def loss_of(model):
    return cross_entropy(model(TOKENS[:, :-1]), TOKENS[:, 1:])


def arrays_of(tree):
    return {name: array for name, array in tree_flatten(tree) if isinstance(array, mx.array)}


def same(first, second):
    return first.keys() == second.keys() and all(mx.array_equal(first[name], second[name]) for name in first)


METHODS = ("lora", "dora", "rslora")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_model_starts_as_it_was_and_trains_the_adapters_alone(family, method):
    targets = ["*.q_proj", "*.v_proj", "embed_tokens"] if family == "moe" and method == "dora" else ALL
    model = build(FAMILIES[family])
    before, logits = arrays_of(model.parameters()), model(TOKENS)
    assert add_adapters(model, AdapterConfig(method=method, rank=2, targets=targets), seed=1) is model
    # DoRA adds a bias behind the magnitudes, in the order of float32's additions.
    assert mx.array_equal(model(TOKENS), logits)
    trainable = arrays_of(model.trainable_parameters())
    assert same(trainable, adapter_parameters(model))
    assert all(array.dtype == mx.float32 for array in trainable.values())
    optimizer = optim.Adam(0.002)
    for _ in range(4):
        loss, gradients = nn.value_and_grad(model, loss_of)(model)
        optimizer.update(model, gradients)
    assert loss_of(model).item() < loss.item()
    after = {
        name.replace(".linear.", ".").replace(".embedding.", "."): a for name, a in named_arrays(model.parameters())
    }
    assert same({name: after[name] for name in before}, before)
    assert all(not mx.array_equal(a, trainable[n]) for n, a in adapter_parameters(model).items())


def test_the_start_follows_from_the_seed_and_leaves_the_random_state_alone():
    mx.random.seed(4)
    expected = mx.random.uniform()
    mx.random.seed(4)
    first, again, other = (adapter_parameters(add_adapters(build(), AdapterConfig(), seed=seed)) for seed in (1, 1, 2))
    mx.random.seed(4)
    add_adapters(build(), AdapterConfig(), seed=1)
    assert mx.random.uniform() == expected
    assert same(first, again)
    assert not any(mx.array_equal(first[name], other[name]) for name in first if name.endswith("lora_a"))
    assert not mx.array_equal(first["layers.0.self_attn.q_proj.lora_a"], first["layers.1.self_attn.q_proj.lora_a"])


def names_of(config, settings=MOE):
    return [name for name, _ in adapted_layers(add_adapters(build(settings), config, seed=0))]


def test_patterns_name_layers():
    attention = [f"self_attn.{name}_proj" for name in "koqv"]
    mlp = [f"mlp.{name}_proj" for name in ("down", "gate", "up")]
    blocks = [f"layers.{block}.{name}" for block in range(3) for name in sorted(attention + mlp)]
    assert names_of(AdapterConfig(), LLAMA) == sorted(blocks)
    assert names_of(AdapterConfig(targets=ALL), UNTIED) == sorted([*blocks, "embed_tokens", "lm_head"])
    assert names_of(AdapterConfig(targets=["q_proj"]), LLAMA) == [f"layers.{n}.self_attn.q_proj" for n in range(3)]
    assert names_of(AdapterConfig(targets=["layers.1.self_attn.?_proj"], layers=2), LLAMA) == [
        f"layers.1.{name}" for name in sorted(attention)
    ]
    assert names_of(AdapterConfig(targets=["*.mlp.*"], layers=1)) == [
        f"layers.2.mlp.{part}.{name}_proj" for part in ("experts", "shared_experts") for name in ("down", "gate", "up")
    ]
    assert names_of(AdapterConfig(targets=["up_proj", "embed_tokens"], layers=1), LLAMA) == [
        "embed_tokens",
        "layers.2.mlp.up_proj",
    ]


PROBLEMS = {
    "no layer": ({"targets": ["q_prj"]}, "must fit a layer that takes adapters but got 'q_prj'. Near it are q_proj"),
    "far": ({"targets": ["layers.0.nothing_like_it"]}, "must fit a layer"),
    "a holder": ({"targets": ["layers.0.mlp"]}, "It is the name of what holds such layers: write layers.0.mlp.*"),
    "a norm": ({"targets": ["norm"]}, "norm is a RMSNorm, which takes none"),
    "before the last": ({"targets": ["layers.0.*"], "layers": 2}, "is in a block before the last ones"),
    "too many": ({"layers": 4}, "layers must be at most the number of blocks, 3, but got 4"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_pattern_without_a_layer_is_an_error_and_changes_nothing(problem):
    changes, message = PROBLEMS[problem]
    model = build()
    before = arrays_of(model.trainable_parameters())
    with pytest.raises(ValueError, match=r"^\[add_adapters\] ") as error:
        add_adapters(model, AdapterConfig(**changes), seed=0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert same(arrays_of(model.trainable_parameters()), before)


def test_what_does_not_go_together_is_an_error():
    model = add_adapters(build(), AdapterConfig(), seed=0)
    with pytest.raises(ValueError, match="model must be without adapters but has some"):
        add_adapters(model, AdapterConfig(), seed=0)
    with pytest.raises(ValueError, match=r"no layer may be one of experts but got layers\.1\."):
        add_adapters(build(MOE), AdapterConfig(method="dora"), seed=0)
    with pytest.raises(ValueError, match="dropout must be 0 in quantisation-aware training"):
        add_adapters(build(), AdapterConfig(dropout=0.1), seed=0, qat=QATConfig())
    with pytest.raises(ValueError, match=r"qat must name the format that the codes of the model have, .* bits=4"):
        add_adapters(coded(), AdapterConfig(), seed=0, qat=QATConfig(bits=8))
    with pytest.raises(ValueError, match="lm_head is float"):
        add_adapters(coded(UNTIED, overrides={"lm_head": None}), AdapterConfig(targets=ALL), seed=0, qat=QATConfig())
    with pytest.raises(ValueError, match="model must have adapters but has none"):
        merge_adapters(build())
    with pytest.raises(ValueError, match="dtype must be left out"):
        merge_adapters(model, dtype=mx.float16)
    with pytest.raises(ValueError, match="replaced must be what merge_adapters gave"):
        unmerge_adapters(build(), {"layers.9.mlp": Linear(2, 2)})
    replaced = merge_adapters(model)
    unmerge_adapters(model, replaced)
    with pytest.raises(ValueError, match=r"\[unmerge_adapters\] model must be merged but has adapters"):
        unmerge_adapters(model, replaced)


WRONG_PATTERNS = {
    "a module that is none": {"modules": ["nope"]},
    "a holder": {"modules": ["layers.0.mlp"]},
    "a norm": {"modules": ["norm"]},
    "an override that fits nothing": {"overrides": {"layers.0.self_attn.q_prj": None}},
    "an override outside of modules": {"modules": ["*.q_proj"], "overrides": {"*.v_proj": None}},
    "an override covered by another": {"overrides": {"layers.0.*": None, "layers.*": {"bits": 4}}},
    "nothing left": {"overrides": {"*": None}},
    "inputs of embeddings": {"modules": ["embed_tokens"], "activations": "int8"},
}


@pytest.mark.parametrize("settings", WRONG_PATTERNS.values(), ids=WRONG_PATTERNS)
def test_patterns_of_qat_are_refused_alike_on_floats_and_on_codes(settings):
    messages = []
    for model in (build(UNTIED), coded(UNTIED)):
        before = arrays_of(model.parameters())
        with pytest.raises(ValueError, match=r"^\[") as error:
            add_adapters(model, AdapterConfig(targets=ALL), seed=0, qat=QATConfig(**settings))
        messages.append(str(error.value))
        assert same(arrays_of(model.parameters()), before)
    assert messages[1] == messages[0].replace("[prepare_qat]", "[add_adapters] qat:")


def test_qat_on_codes_must_choose_an_adapted_layer():
    with pytest.raises(ValueError, match=r"qat must choose a layer that gets an adapter.* chooses 1 that get none"):
        add_adapters(coded(), AdapterConfig(), seed=0, qat=QATConfig(modules=["embed_tokens"]))
    model = coded(UNTIED, overrides={"lm_head": None})
    add_adapters(model, AdapterConfig(targets=ALL), seed=0, qat=QATConfig(overrides={"lm_head": None}))
    layers = dict(adapted_layers(model))
    assert not isinstance(layers.pop("lm_head"), FakeQuantAdapter)
    assert all(isinstance(layer, FakeQuantAdapter) for layer in layers.values())


@pytest.mark.parametrize(
    "values",
    [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}, {"targets": []}, {"layers": 0}, {"method": "loha"}, {"r": 8}],
    ids=str,
)
def test_a_config_out_of_range_is_an_error(values):
    with pytest.raises(ValidationError):
        AdapterConfig(**values)


def test_scales():
    assert AdapterConfig(rank=4, alpha=6.0).scale == 1.5
    assert AdapterConfig(rank=4, alpha=6.0, method="dora").scale == 1.5
    assert AdapterConfig(rank=4, alpha=6.0, method="rslora").scale == 3.0


DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("method", METHODS)
def test_merged_weights_are_the_formula_s_rounded_once_and_unmerging_gives_everything_back(method, dtype):
    model = taught(add_adapters(build(UNTIED, dtype), AdapterConfig(method=method, rank=3, targets=ALL), seed=1))
    before, logits = arrays_of(model.parameters()), model(TOKENS)
    layers, scale = dict(adapted_layers(model)), AdapterConfig(method=method, rank=3).scale
    replaced = merge_adapters(model)
    assert not adapted_layers(model)
    for name, module in model.named_modules():
        if name in layers:
            layer = layers[name]
            wide = {k: np.array(layer[k].astype(mx.float32), dtype=np.float64) for k in ("lora_a", "lora_b")}
            delta = scale * wide["lora_a"] @ wide["lora_b"]
            moved = np.array(layer.base.weight.astype(mx.float32), dtype=np.float64)
            moved = moved + (delta if layer.kind == "embedding" else delta.T)
            if method == "dora":
                moved *= (np.array(layer.m, dtype=np.float64) / np.linalg.norm(moved, axis=1))[:, None]
            ulps = {mx.float32: 2e-7, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
            found = np.array(module.weight.astype(mx.float32), dtype=np.float64)
            assert module.weight.dtype == dtype
            np.testing.assert_allclose(found, moved, rtol=1.01 * ulps, atol=2e-6 * np.abs(moved).max(), err_msg=name)
    if dtype == mx.float32:
        np.testing.assert_allclose(
            np.array(model(TOKENS)), np.array(logits), rtol=0, atol=1e-5 * mx.abs(logits).max().item()
        )
    unmerge_adapters(model, replaced)
    assert same(arrays_of(model.parameters()), before)
    assert mx.array_equal(model(TOKENS), logits)


@pytest.mark.parametrize("mode", ["affine", "nvfp4", "int8"])
def test_merged_codes_are_those_of_the_adapted_weight_in_the_base_s_format(mode):
    model = taught(add_adapters(coded(MOE, weights=mode), AdapterConfig(rank=2, targets=ALL), seed=1))
    layers, others = dict(adapted_layers(model)), model.layers[0].input_layernorm
    weights = {name: layer.effective_weight() for name, layer in layers.items()}
    formats = {name: layer.base.format for name, layer in layers.items()}
    replaced = merge_adapters(model)
    merged = {name: module for name, module in model.named_modules() if isinstance(module, Coded)}
    assert merged.keys() == weights.keys()
    for name, module in merged.items():
        codes, scales, *_ = quantize(weights[name], mode)
        assert module.format == formats[name]
        assert mx.array_equal(module.weight, codes), name
        assert mx.array_equal(module.scales, scales), name
    unmerge_adapters(model, replaced)
    merge_adapters(model, dequantize=True)
    assert not any(isinstance(module, Coded) for module in model.modules())
    assert same({name: module.weight for name, module in model.named_modules() if name in weights}, weights)
    assert model.layers[0].input_layernorm is others


def test_dequantising_reaches_layers_without_adapters():
    model = coded(UNTIED)
    weight = model.lm_head.effective_weight()
    add_adapters(model, AdapterConfig(targets=["q_proj"]), seed=0)
    merge_adapters(model)
    assert type(model.lm_head) is QuantizedLinear
    add_adapters(model, AdapterConfig(targets=["q_proj"]), seed=0)
    merge_adapters(model, dequantize=True)
    assert type(model.lm_head) is Linear
    assert mx.array_equal(model.lm_head.weight, weight)


def test_layers_of_mlx_nn_quantize_take_adapters_too():
    model = build(UNTIED)
    nn.quantize(model, 64, 4, class_predicate=lambda name, _: name.endswith("_proj"))
    logits = model(TOKENS)
    taught(add_adapters(model, AdapterConfig(), seed=0))
    assert not mx.array_equal(model(TOKENS), logits)
    with adapters_disabled(model):
        assert mx.array_equal(model(TOKENS), logits)
    weight = dict(adapted_layers(model))["layers.0.mlp.up_proj"].effective_weight()
    merge_adapters(model)
    assert type(model.layers[0].mlp.up_proj) is nn.QuantizedLinear
    assert mx.array_equal(model.layers[0].mlp.up_proj.weight, quantize(weight, "affine", bits=4, group_size=64)[0])


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_function_has_the_model_with_and_without_adapters(method):
    model = build()
    logits = model(TOKENS)
    taught(add_adapters(model, AdapterConfig(method=method, targets=ALL), seed=1))

    @mx.compile
    def both(parameters):
        model.update(parameters)
        adapted = model(TOKENS)
        with adapters_disabled(model):
            return adapted, model(TOKENS)

    held = model.trainable_parameters()
    adapted, plain = both(held)
    model.update(held)
    np.testing.assert_allclose(np.array(plain), np.array(logits), rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.array(adapted), np.array(model(TOKENS)), rtol=0, atol=1e-5)
    assert mx.abs(adapted - plain).max() > 0.1
    with pytest.raises(RuntimeError, match="inside"), adapters_disabled(model):
        raise RuntimeError("inside")
    assert not mx.array_equal(model(TOKENS), logits)


@pytest.mark.parametrize("start", ["floats", "codes"])
@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("lora", "llama"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("dora", "untied"), ("lora", "moe")]),
    ],
)
def test_what_is_trained_quantised_is_what_the_codes_give(method, family, start):
    qat = QATConfig(bits=4, group_size=32)
    settings = FAMILIES[family]
    model = coded(settings, bits=4, group_size=32) if start == "codes" else build(settings)
    base = {name: float_weight(module) for name, module in model.named_modules() if isinstance(module, Coded)}
    add_adapters(model, AdapterConfig(method=method, rank=2, targets=ALL), seed=1, qat=qat)
    assert all(isinstance(layer, FakeQuantAdapter) for _, layer in adapted_layers(model))
    optimizer = optim.Adam(0.003)
    step = nn.value_and_grad(model, loss_of)
    first = loss_of(model).item()
    for _ in range(6):
        _, gradients = step(model)
        optimizer.update(model, gradients)
    assert loss_of(model).item() < first - 0.02
    trained = {name: layer.effective_weight() for name, layer in adapted_layers(model)}
    assert not any(mx.array_equal(base[name], trained[name]) for name in base)
    logits = model(TOKENS)
    replaced = merge_adapters(model)
    merged = {name: module for name, module in model.named_modules() if isinstance(module, Coded)}
    assert same({name: float_weight(module) for name, module in merged.items()}, trained)
    np.testing.assert_allclose(np.array(model(TOKENS)), np.array(logits), rtol=0, atol=1e-4)
    unmerge_adapters(model, replaced)
    assert mx.array_equal(model(TOKENS), logits)


@DTYPES
def test_the_codes_of_16_bit_training_are_those_that_the_compiled_step_saw(dtype):
    model = build(LLAMA, dtype)
    taught(add_adapters(model, AdapterConfig(rank=2, targets=ALL), seed=1, qat=QATConfig(group_size=32)))

    @mx.compile
    def seen(parameters):
        model.update(tree_map(lambda array: array.astype(dtype), parameters))
        return {name: layer.effective_weight() for name, layer in adapted_layers(model)}

    held = model.trainable_parameters()
    weights = seen(held)
    model.update(held)
    replaced = merge_adapters(model, dtype=dtype)
    merged = {name: float_weight(module) for name, module in model.named_modules() if isinstance(module, Coded)}
    assert same(merged, weights)
    # What is put back still has the float32 parameters.
    unmerge_adapters(model, replaced)
    assert same(arrays_of(model.trainable_parameters()), arrays_of(held))


@pytest.mark.slow
@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], ["q_proj"]], ids=["head adapted", "head frozen"])
def test_the_trainer_s_step_has_the_gradients_of_plain_logits(targets):
    model = taught(add_adapters(build(LLAMA), AdapterConfig(rank=2, targets=targets), seed=1))
    loss, expected = nn.value_and_grad(model, loss_of)(model)
    step = TrainStep(model, build_optimizer(OptimConfig()), mx.float32, None)
    rows = np.array(TOKENS)
    mean, _, found, count = step.gradients([Batch(rows[:, :-1], rows[:, 1:])], seed=0)
    assert count == 12
    assert mean == pytest.approx(loss.item(), rel=1e-5)
    expected, found = arrays_of(expected), arrays_of(found)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        np.testing.assert_allclose(
            np.array(found[name]) / count, np.array(want), rtol=0, atol=1e-5 * max(1e-3, mx.abs(want).max().item())
        )
