"""From a float model to codes: what prepare_qat changes, what it trains, and that convert_qat deploys just that."""

from forge_mlx.kernels import fake_quant, quantize
from forge_mlx.kernels.quantize.options import MODES
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.moe import MoEConfig
from forge_mlx.models.qat import (
    QATConfig,
    convert_qat,
    fake_quant_enabled,
    is_prepared,
    prepare_qat,
    set_fake_quant,
)
from forge_mlx.models.registry import build_model
from forge_mlx.nn import (
    CodesEmbedding,
    CodesExpertLinear,
    CodesLinear,
    Linear,
    QuantizedEmbedding,
    QuantizedExpertLinear,
    QuantizedLinear,
    cross_entropy,
)
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.fake_quant import FakeQuantized
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
import numpy as np
import pytest
import reference_gpt as reference
import torch

SHAPE = {"vocab_size": 33, "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2}
LLAMA = {**SHAPE, "intermediate_size": 128, "rope_base": 500.0}
UNTIED = {**LLAMA, "tie_embeddings": False}
MOE = {**LLAMA, "arch": "moe", "num_experts": 4, "shared_experts": 1, "dense_layers": 1, "selection_bias": True}
GPT2 = {**SHAPE, "num_kv_heads": 4, "norm": "layer_norm", "position": "learned", "bias": True, "mlp": "gelu"}
FAMILIES = {"llama": LLAMA, "untied": UNTIED, "gpt2": GPT2, "moe": MOE}
TOKENS = mx.array(np.random.default_rng(0).integers(0, 33, (2, 7)).astype(np.int32))
# Two modes of MLX's, one that becomes one, one that does not.
SOME_MODES = ("affine", "nvfp4", "ternary", "int4")


def build(settings=LLAMA, seed=1):
    """A model whose every parameter is random, and so large that quantised logits are far from the float ones."""
    config = (MoEConfig if settings.get("arch") == "moe" else GPTConfig)(**settings)
    model = build_model(config)
    rng = np.random.default_rng(seed)
    start = []
    for name, p in tree_flatten(model.parameters()):
        value = rng.standard_normal(p.shape) * 0.2
        start.append((name, mx.array((value + (name.endswith("norm.weight") and p.ndim == 1)).astype(np.float32))))
    model.update(tree_unflatten(start))
    return model.eval()


def layers(model, kind):
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def weights(model):
    return {name: layer.effective_weight() for name, layer in layers(model, (FakeQuantized, Coded)).items()}


def with_quantised_weights(settings, prepared):
    """The float model with the weights that a prepared one computes with."""
    model = build(settings)
    model.update(prepared.parameters())
    model.update(tree_unflatten([(f"{name}.weight", weight) for name, weight in weights(prepared).items()]))
    return model


def loss_of(model):
    return cross_entropy(model(TOKENS[:, :-1]), TOKENS[:, 1:])


def gradients(model):
    value, found = nn.value_and_grad(model, loss_of)(model)
    return {"loss": value} | dict(tree_flatten(found))


def off(got, want):
    got, want = (np.array(each.astype(mx.float32), dtype=np.float64) for each in (got, want))
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_replaced_and_no_parameter_is(family):
    model = build(FAMILIES[family])
    before = dict(tree_flatten(model.parameters()))
    trainable = [name for name, _ in tree_flatten(model.trainable_parameters())]
    model.layers[0].self_attn.q_proj.freeze()
    names = {name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Embedding")}
    names |= {f"layers.1.mlp.experts.{name}_proj" for name in ("gate", "up", "down")} if family == "moe" else set()
    assert prepare_qat(model, QATConfig()) is model
    assert is_prepared(model)
    assert set(layers(model, FakeQuantized)) == names
    after = dict(tree_flatten(model.parameters()))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    frozen = {f"layers.0.self_attn.q_proj.{name}" for name in ("weight", "bias")}
    assert [name for name, _ in tree_flatten(model.trainable_parameters())] == [n for n in trainable if n not in frozen]
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", SOME_MODES)
def test_a_prepared_model_is_the_one_with_the_quantised_weights_and_so_are_its_gradients(mode, family):
    float_logits = build(FAMILIES[family])(TOKENS)
    model = prepare_qat(build(FAMILIES[family]), QATConfig(weights=mode))
    plain = with_quantised_weights(FAMILIES[family], model)
    assert off(model(TOKENS), float_logits) > 0.05
    assert mx.array_equal(model(TOKENS), plain(TOKENS))
    want, got = gradients(plain), gradients(model)
    assert want.keys() == got.keys()
    for name, gradient in want.items():
        assert mx.array_equal(got[name], gradient), name


def test_clip_stops_the_gradients_of_clipped_weights_alone():
    passed, stopped = (
        gradients(prepare_qat(build(MOE), QATConfig(weights="ternary", ste=ste))) for ste in ("identity", "clip")
    )
    model = build(MOE)
    found = prepare_qat(build(MOE), QATConfig(weights="ternary"))
    for name in layers(found, FakeQuantized):
        w = np.array(dict(tree_flatten(model.parameters()))[f"{name}.weight"], dtype=np.float64)
        clipped = np.abs(w / np.abs(w).mean(axis=(-1, -2), keepdims=True)) >= 1.5
        want = np.where(clipped, 0, np.array(passed.pop(f"{name}.weight")))
        np.testing.assert_array_equal(np.array(stopped.pop(f"{name}.weight")), want, err_msg=name)
    for name, gradient in passed.items():
        assert mx.array_equal(stopped[name], gradient), name


KINDS = {
    **dict.fromkeys(
        ("affine", "mxfp4", "mxfp8", "nvfp4", "ternary"), (QuantizedLinear, QuantizedEmbedding, QuantizedExpertLinear)
    ),
    **dict.fromkeys(("int8", "int4", "fp8_e4m3"), (CodesLinear, CodesEmbedding, CodesExpertLinear)),
}


@pytest.mark.parametrize("dtype", [None, mx.float16, mx.bfloat16], ids=["as it is", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_converted_layers_hold_the_codes_that_quantize_computes(mode, dtype):
    model = prepare_qat(build(MOE), QATConfig(weights=mode))
    before = {name: layer.weight.astype(dtype or mx.float32) for name, layer in layers(model, FakeQuantized).items()}
    assert convert_qat(model, dtype) is model
    assert not is_prepared(model)
    found = layers(model, Coded)
    assert found.keys() == before.keys()
    for name, weight in before.items():
        assert mx.array_equal(found[name].weight, quantize(weight, mode)[0]), name
        assert mx.array_equal(found[name].effective_weight(), fake_quant(weight, mode)), name
    assert {type(layer) for layer in found.values()} == set(KINDS[mode])
    # A router and norms follow the dtype, the frozen selection bias does not: as in the trainer's forward pass.
    assert model.layers[1].mlp.router.weight.dtype == model.norm.weight.dtype == (dtype or mx.float32)
    assert model.layers[1].mlp.router.selection_bias.dtype == mx.float32
    assert not any(module.training for module in model.modules())


def float64_logits(model, tokens):
    p = {name: torch.tensor(np.array(value.astype(mx.float32)), dtype=torch.float64) for name, value in model.items()}
    options = {"num_layers": 2, "head_dim": 16, "eps": 1e-5, "base": 500.0, "mlp": "swiglu"}
    return reference.llama(p, torch.tensor(np.array(tokens)).long(), **options).numpy()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("settings", [LLAMA, pytest.param(UNTIED, marks=pytest.mark.slow)], ids=["tied", "untied"])
@pytest.mark.parametrize("mode", MODES)
def test_logits_before_and_after_are_as_near_to_the_truth(mode, settings, dtype):
    """PyTorch in float64 with the quantised weights is the truth; the model in training may be as far off as it is.

    In 16 bits the products of codes are computed with float32 inputs, as GPUs sum them: MLX's CPU code sums in 16 bits.
    """
    model = prepare_qat(build(settings), QATConfig(weights=mode))
    model.update(tree_map(lambda a: a.astype(dtype), model.parameters()))
    arrays = dict(tree_flatten(model.parameters())) | {f"{n}.weight": w for n, w in weights(model).items()}
    truth = float64_logits(arrays, TOKENS)
    trained = np.abs(np.array(model(TOKENS).astype(mx.float32)) - truth).max()
    convert_qat(model)
    if dtype != mx.float32:
        # What is not in codes has all of its bits in float32, and MLX's affine scales and biases too.
        wide = [(n, a.astype(mx.float32)) for n, a in tree_flatten(model.parameters()) if a.dtype == dtype]
        model.update(tree_unflatten([(n, a) for n, a in wide if "scales" not in n and "biases" not in n]))
    got = np.abs(np.array(model(TOKENS).astype(mx.float32)) - truth).max()
    rtol = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 1e-2}[dtype]
    assert got <= 2 * trained + rtol * np.abs(truth).max()


@pytest.mark.parametrize("activations", [None, "int8"], ids=["float inputs", "int8 inputs"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_the_converted_model_gives_the_logits_of_training(mode, family, activations):
    model = prepare_qat(build(FAMILIES[family]), QATConfig(weights=mode, activations=activations))
    trained, head = model(TOKENS), model.head_weight
    convert_qat(model)
    assert mx.array_equal(model.head_weight, head)
    # A quantised input that lies between two codes may go either way after a rounding before it.
    assert off(model(TOKENS), trained) <= (2e-6 if activations is None else 0.02)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", SOME_MODES)
def test_counts_are_those_of_the_weights_that_codes_stand_for(mode, family):
    def counts():
        found = [model.num_parameters(), model.num_parameters(embeddings=False), model.flops_per_token(7)]
        if family == "moe":
            found += [model.num_active_parameters(), model.num_active_parameters(embeddings=False)]
        return found

    model = build(FAMILIES[family])
    of_floats = counts()
    prepare_qat(model, QATConfig(weights=mode))
    assert counts() == of_floats
    convert_qat(model)
    assert model.layers[0].self_attn.q_proj.weight.dtype == mx.uint32
    assert counts() == of_floats


def test_generation_with_a_cache_is_that_without_one():
    model = convert_qat(prepare_qat(build(MOE), QATConfig(weights="affine", activations="int8")))
    whole, cache = model(TOKENS), model.make_cache()
    parts = mx.concatenate([model(TOKENS[:, i : i + 1], cache) for i in range(TOKENS.shape[1])], axis=1)
    assert off(parts, whole) <= 0.02


def test_overrides_choose_per_module_and_the_last_that_fits_counts():
    config = QATConfig(
        weights="affine",
        bits=2,
        group_size=32,
        activations="int8",
        overrides={
            "layers.*": {"bits": 3},
            "*.self_attn.*": {"group_size": 64},
            "layers.1.*": {"weights": "ternary", "granularity": "row", "activations": "float"},
            "layers.*.v_proj": None,
            "embed_tokens": {"bits": 8},
            "lm_head": {"weights": "int8"},
        },
    )
    model = prepare_qat(build(UNTIED), config)
    found = {
        n: (x.options.mode, x.options.bits, x.options.group_size, x.activations)
        for n, x in layers(model, FakeQuantized).items()
    }
    assert found["layers.0.mlp.up_proj"] == ("affine", 3, 32, "int8")
    assert found["layers.0.self_attn.q_proj"] == ("affine", 2, 64, "int8")
    assert found["layers.1.mlp.up_proj"] == ("ternary", 2, None, None)
    assert found["embed_tokens"] == ("affine", 8, 32, None)
    assert found["lm_head"] == ("int8", 8, None, None)
    left_out = {"layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj"}
    assert left_out.isdisjoint(found)
    assert len(found) == 14
    for name, layer in layers(model, FakeQuantized).items():
        o = layer.options
        want = fake_quant(
            layer.weight,
            o.mode,
            bits=o.bits if o.group_size else None,
            group_size=o.group_size,
            granularity=o.granularity,
        )
        assert mx.array_equal(layer.effective_weight(), want), name
    convert_qat(model)
    assert type(model.layers[0].self_attn.v_proj) is Linear
    assert isinstance(model.lm_head, CodesLinear)


def test_modules_choose_what_is_quantised():
    model = prepare_qat(build(), QATConfig(modules=["layers.*.mlp.*", "layers.1.self_attn.?_proj"]))
    names = {f"layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")}
    assert set(layers(model, FakeQuantized)) == names | {f"layers.1.self_attn.{n}_proj" for n in "qkvo"}
    assert type(model.layers[0].self_attn.q_proj) is Linear


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules": ["layer.*.mlp.up_proj"]}, r"modules: .* 'layer.\*.mlp.up_proj'\. Near it are layers"),
        ({"modules": ["*", "x"]}, r"modules: .* got 'x'\. There are 18, such as embed_tokens, layers"),
        (
            {"modules": ["layers.0"]},
            r"modules: .* got 'layers\.0'\. It is the name of what holds such layers: write layers\.0\.\*\.",
        ),
        ({"modules": ["norm"]}, r"modules: .* got 'norm'\. norm is a RMSNorm, which stays float\."),
        ({"overrides": {"*.router": None}}, r"overrides: .* layers\.1\.mlp\.router is a Router, which stays float\."),
        (
            {"modules": ["*.mlp.*"], "overrides": {"embed_tokens": {"bits": 8}}},
            r"overrides: .* got 'embed_tokens'\. embed_tokens is not among `modules`: add it there\.",
        ),
        (
            {"overrides": {"embed*": {"activations": "int8"}}},
            r"overrides: activations must be left out for 'embed\*', which fits only the output head or embeddings",
        ),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused_and_nothing_changes(settings, message):
    model = build(MOE)
    with pytest.raises(ValueError, match=r"\[prepare_qat\] " + message):
        prepare_qat(model, QATConfig(**settings))
    assert not is_prepared(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overrides": {"*": None}}, "overrides: a layer must be left to quantise but null fits all"),
        ({"modules": ["embed*"], "overrides": {"embed*": None}}, "overrides: a layer must be left"),
        (
            {"overrides": {"embed_tokens": {"bits": 8}, "*": {"bits": 2}}},
            "overrides: a pattern must decide about a layer but all that 'embed_tokens' fits are fitted by later ones",
        ),
        (
            {"overrides": {"*_proj": {"bits": 8}, "layers.0.*": None, "layers.1.*": None}},
            r"overrides: .* but all that '\*_proj' fits",
        ),
        (
            {"modules": ["embed_tokens", "lm_head"], "activations": "int8"},
            "activations must be null where the inputs of all quantised layers stay float.* but got int8",
        ),
        ({"activations": "int8", "overrides": {"*": {"activations": "float"}}}, "activations must be null"),
    ],
)
def test_what_would_have_no_effect_is_refused_and_nothing_changes(settings, message):
    model = build(UNTIED)
    with pytest.raises(ValueError, match=r"\[prepare_qat\] " + message):
        prepare_qat(model, QATConfig(**settings))
    assert not is_prepared(model)


def test_models_that_cannot_be_prepared():
    for model, message in (
        (convert_qat(prepare_qat(build(), QATConfig())), "model must hold floats but embed_tokens holds codes"),
        (nn.QuantizedLinear(64, 64), "model must hold floats but it holds codes"),
        (Linear(64, 64), "model must be a module that holds the layers .* but is itself a Linear"),
        (nn.RMSNorm(4), "model must have linear layers, .* but the RMSNorm has none"),
    ):
        with pytest.raises(ValueError, match=r"\[prepare_qat\] " + message):
            prepare_qat(model, QATConfig())
    with pytest.raises(ValueError, match=r"\[prepare_qat\] config must be a QATConfig but got a dict\."):
        prepare_qat(build(), {"weights": "affine"})


def test_activations_of_an_untied_head_are_refused_and_else_left_float():
    with pytest.raises(ValueError, match="activations must be left out for 'lm_head'"):
        prepare_qat(build(UNTIED), QATConfig(overrides={"lm_head": {"activations": "int8"}}))
    model = prepare_qat(build(UNTIED), QATConfig(activations="int8"))
    assert model.lm_head.activations is None
    assert model.layers[0].mlp.up_proj.activations == "int8"


def test_all_shapes_that_do_not_fit_are_named_at_once_and_nothing_changes():
    model = build({**UNTIED, "hidden_size": 48, "num_heads": 3, "num_kv_heads": 3})
    with pytest.raises(ValueError, match=r"\[prepare_qat\] the last axis .* overrides: \{NAME: null\}\.") as caught:
        prepare_qat(model, QATConfig(overrides={"lm_head": {"weights": "ternary"}, "*.k_proj": {"weights": "int8"}}))
    text = str(caught.value)
    assert "lm_head (33, 48) (ternary: a multiple of 32)" in text
    assert "layers.1.mlp.up_proj (128, 48) (affine: a multiple of 64)" in text
    assert text.count("a multiple of") == 12
    assert "k_proj" not in text
    assert "down_proj" not in text
    assert not is_prepared(model)


def test_preparing_twice_converting_too_early_and_switching_nothing_are_refused():
    model = build()
    with pytest.raises(ValueError, match=r"\[convert_qat\] model must be prepared"):
        convert_qat(model)
    with pytest.raises(ValueError, match=r"\[set_fake_quant\] model must be prepared"):
        set_fake_quant(model, True)
    prepare_qat(model, QATConfig(modules=["embed_tokens"]))
    with pytest.raises(ValueError, match=r"\[prepare_qat\] model must be without fake quantisation"):
        prepare_qat(model, QATConfig())
    with pytest.raises(ValueError, match=r"\[convert_qat\] dtype must be float32, float16 or bfloat16 but got .*int32"):
        convert_qat(model, mx.int32)


class Twice(nn.Module):
    """Has a layer in two places."""

    def __init__(self):
        super().__init__()
        self.first = Linear(64, 64)
        self.blocks = [Linear(64, 64), self.first]

    def __call__(self, x):
        return self.blocks[1](self.blocks[0](self.first(x)))


@pytest.mark.parametrize(
    "settings", [{"modules": ["first"]}, {"overrides": {"blocks.1": None}}, {"overrides": {"first": {"bits": 8}}}]
)
def test_a_layer_in_two_places_cannot_be_quantised_in_two_ways(settings):
    model = Twice()
    with pytest.raises(
        ValueError, match=r"\[prepare_qat\] a layer in several places .* but blocks\.1, first, which are one"
    ):
        prepare_qat(model, QATConfig(**settings))
    assert not is_prepared(model)


def test_a_layer_in_two_places_stays_one():
    model, x = Twice(), mx.ones((1, 64))
    prepare_qat(model, QATConfig())
    assert model.first is model.blocks[1]
    y = model(x)
    convert_qat(model)
    assert model.first is model.blocks[1]
    assert off(model(x), y) <= 1e-6


def test_fake_quantisation_switched_off_is_the_float_model_and_on_again_the_quantised_one():
    model = build(MOE)
    plain = model(TOKENS)
    prepare_qat(model, QATConfig(activations="int8"))
    quantised = model(TOKENS)
    set_fake_quant(model, False)
    assert is_prepared(model)
    assert mx.array_equal(model(TOKENS), plain)
    assert mx.array_equal(model.head_weight, model.embed_tokens.weight)
    set_fake_quant(model, True)
    assert mx.array_equal(model(TOKENS), quantised)


def test_steps_at_which_it_begins_and_ends():
    def on(**settings):
        return [fake_quant_enabled(QATConfig(**settings), step) for step in range(6)]

    assert on() == [True] * 6
    assert on(start_step=2) == [False, False, True, True, True, True]
    assert on(start_step=2, end_step=4) == [False, False, True, True, False, False]


def test_a_tied_table_has_the_gradients_of_both_uses():
    model = prepare_qat(build(), QATConfig(weights="int4"))
    gradient = gradients(model)["embed_tokens.weight"]
    untied = build(UNTIED)
    arrays = dict(tree_flatten(model.parameters()))
    untied.update(tree_unflatten([*arrays.items(), ("lm_head.weight", arrays["embed_tokens.weight"])]))
    apart = gradients(prepare_qat(untied, QATConfig(weights="int4")))
    assert apart["embed_tokens.weight"].any()
    assert apart["lm_head.weight"].any()
    assert off(gradient, apart["embed_tokens.weight"] + apart["lm_head.weight"]) <= 1e-5


def test_optimizer_states_and_weights_of_a_float_model_go_on_in_a_prepared_one():
    """A run that began in float and is prepared later is the one that was prepared and switched off until then."""

    def train(model, optimizer, steps):
        for _ in range(steps):
            _, grads = nn.value_and_grad(model, loss_of)(model)
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)

    first, second = build(), prepare_qat(build(), QATConfig())
    set_fake_quant(second, False)
    optimizers = [optim.Adam(1e-2), optim.Adam(1e-2)]
    train(first, optimizers[0], 2)
    train(second, optimizers[1], 2)
    prepare_qat(first, QATConfig())
    set_fake_quant(second, True)
    train(first, optimizers[0], 2)
    train(second, optimizers[1], 2)
    for (name, one), (_, other) in zip(*(tree_flatten(m.parameters()) for m in (first, second)), strict=True):
        assert mx.array_equal(one, other), name


def test_training_at_two_bits_beats_rounding_afterwards():
    """Next of a cycle of 32 tokens in one of two directions, which the first token decides: 2 bits are few for it."""
    rng = np.random.default_rng(3)
    starts, ways = rng.integers(0, 32, 8), rng.choice([1, -1], 8)
    rows = np.array([(start + way * np.arange(13)) % 32 for start, way in zip(starts, ways, strict=True)])
    inputs, targets = mx.array(rows[:, :-1].astype(np.int32)), mx.array(rows[:, 1:].astype(np.int32))
    settings = {
        "vocab_size": 32,
        "num_layers": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "mlp": "relu2",
    }
    config = QATConfig(weights="affine", bits=2, group_size=32)

    def loss(model):
        return cross_entropy(model(inputs), targets)

    def trained(prepared):
        model = GPT(GPTConfig(**settings), seed=2)
        if prepared:
            prepare_qat(model, config)
        optimizer = optim.Adam(1e-2)
        for _ in range(60):
            _, grads = nn.value_and_grad(model, loss)(model)
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)
        return model

    plain = trained(prepared=False)
    in_float = loss(plain).item()
    afterwards = loss(convert_qat(prepare_qat(plain, config))).item()
    meanwhile = loss(convert_qat(trained(prepared=True))).item()
    assert in_float < meanwhile < 0.7 * afterwards
