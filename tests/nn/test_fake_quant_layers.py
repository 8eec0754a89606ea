"""The layers of training: the weight they compute with, its gradient, and that all else is as in the float ones."""

from forge_mlx.kernels import fake_quant, quantize
from forge_mlx.kernels.quantize.options import MODES, checked_options
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.nn import (
    Embedding,
    ExpertLinear,
    FakeQuantEmbedding,
    FakeQuantExpertLinear,
    FakeQuantLinear,
    Linear,
    QuantizedLinear,
)
from forge_mlx.nn.fake_quant import columns_multiple
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import numpy as np
import pytest

DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)


def options(mode="affine", bits=None, group_size=None, granularity=None):
    return checked_options("test", mode, bits, group_size, granularity)


def random(*shape, seed=0, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def linear(bias=True, dtype=mx.float32):
    layer = Linear(64, 40, bias=bias)
    layer.weight = random(40, 64, seed=1)
    if bias:
        layer.bias = random(40, seed=2)
    layer.set_dtype(dtype)
    return layer


def gradients(layer, *inputs):
    """Value and gradients of sum(layer(...)^3) by the layer's parameters."""
    value, found = nn.value_and_grad(layer, lambda *args: (layer(*args).astype(mx.float32) ** 3).sum())(*inputs)
    return {"value": value} | dict(tree_flatten(found))


def float64(array):
    return np.array(array.astype(mx.float32), dtype=np.float64)


@DTYPES
@pytest.mark.parametrize("mode", MODES)
def test_a_linear_layer_is_one_with_the_quantised_weight_and_so_are_its_gradients(mode, dtype):
    plain, x = linear(dtype=dtype), random(5, 64, dtype=dtype)
    trained = FakeQuantLinear(linear(dtype=dtype), options(mode))
    plain.weight = fake_quant(plain.weight, mode)
    assert not mx.array_equal(plain.weight, trained.weight)
    assert mx.array_equal(trained.effective_weight(), plain.weight)
    for (name, want), got in zip(gradients(plain, x).items(), gradients(trained, x).values(), strict=True):
        assert mx.array_equal(got, want), name
    grad = mx.grad(lambda layer, x: (layer(x).astype(mx.float32) ** 2).sum(), argnums=1)
    assert mx.array_equal(grad(trained, x), grad(plain, x))


def test_a_ternary_layer_in_numpy():
    """BitNet b1.58's formula, written out; the gradients are those of the product with that weight."""
    layer, x = linear(), random(5, 64)
    w, b, inputs = float64(layer.weight), float64(layer.bias), float64(x)
    scale = np.abs(w).mean()
    rounded = scale * np.clip(np.rint(w / scale), -1, 1)
    y = inputs @ rounded.T + b
    found = gradients(FakeQuantLinear(layer, options("ternary")), x)
    np.testing.assert_allclose(float64(found["value"]), (y**3).sum(), rtol=1e-4)
    np.testing.assert_allclose(float64(found["weight"]), 3 * (y**2).T @ inputs, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(float64(found["bias"]), 3 * (y**2).sum(axis=0), rtol=1e-4)


def test_clipped_weights_have_no_gradient():
    layer, x = linear(), random(5, 64)
    passed = gradients(FakeQuantLinear(layer, options("ternary")), x)["weight"]
    stopped = gradients(FakeQuantLinear(layer, options("ternary"), ste="clip"), x)["weight"]
    w = float64(layer.weight)
    clipped = np.abs(w / np.abs(w).mean()) >= 1.5
    assert 0.1 < clipped.mean() < 0.5
    np.testing.assert_array_equal(float64(stopped), np.where(clipped, 0, float64(passed)))


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (0, 64), (2, 0, 64)], ids=str)
@pytest.mark.parametrize("activations", [None, "int8"], ids=["float input", "int8 input"])
def test_shapes_of_inputs(shape, activations):
    x = random(*shape)
    layer = FakeQuantLinear(linear(), options(), activations=activations)
    y = layer(x)
    assert y.shape == (*shape[:-1], 40)
    if x.size:
        rows = float64(x).reshape(-1, 64)
        if activations:
            scale = np.abs(rows).max(axis=1, keepdims=True) / 127
            rows = scale * np.rint(rows / scale)
        want = rows @ float64(layer.effective_weight()).T + float64(layer.bias)
        np.testing.assert_allclose(float64(y).reshape(-1, 40), want, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_quantised_input_passes_the_rounding_by():
    layer, x = linear(), random(5, 64)
    layer = FakeQuantLinear(layer, options(), activations="int8")
    dx = mx.grad(lambda x: layer(x).sum())(x)
    want = layer.effective_weight().sum(axis=0)
    assert mx.allclose(dx, mx.broadcast_to(want, x.shape), rtol=1e-5, atol=1e-5)


@DTYPES
def test_without_fake_quantisation_it_is_the_float_layer_to_the_bit(dtype):
    plain, x = linear(dtype=dtype), random(5, 64, dtype=dtype)
    trained = FakeQuantLinear(plain, options("int4"), ste="clip", activations="int8")
    quantised = trained(x)
    trained.enabled = False
    assert trained.effective_weight() is trained.weight
    assert not mx.array_equal(trained(x), quantised)
    for (name, want), got in zip(gradients(plain, x).items(), gradients(trained, x).values(), strict=True):
        assert mx.array_equal(got, want), name


def test_parameters_are_the_same_arrays_with_the_same_names_and_frozen_ones_stay_frozen():
    plain = linear()
    plain.freeze(keys=["bias"])
    plain.eval()
    trained = FakeQuantLinear(plain, options())
    assert trained.weight is plain.weight
    assert trained.bias is plain.bias
    assert list(trained.trainable_parameters()) == ["weight"]
    assert sorted(trained.parameters()) == ["bias", "weight"]
    assert not trained.training
    assert repr(trained) == "FakeQuantLinear((40, 64), mode=affine, bits=4, group_size=64, ste=identity)"


@pytest.mark.slow
def test_compiled_it_gives_the_same():
    layer, x = FakeQuantLinear(linear(), options("affine", bits=2)), random(5, 64)
    assert mx.allclose(mx.compile(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_layers_run_on_the_engine_that_is_asked_for(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def recorded(self, *args, **options):
        launched.append(self.source.name)
        return call(self, *args, **options)

    monkeypatch.setattr(MetalKernel, "__call__", recorded)
    layer, x = FakeQuantLinear(linear(), options(), activations="int8"), random(5, 64)
    want = layer(x)
    assert launched == []
    with use_engine("emulator"):
        got = layer(x)
        mx.eval(got)
    assert sorted(name for name in launched if "quant" in name) == ["fake_quant_groups", "fake_quant_rows"]
    assert mx.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_the_quantiser_of_mlx_is_refused():
    block = nn.Sequential(FakeQuantLinear(linear(), options()))
    with pytest.raises(
        ValueError, match=r"\[FakeQuantLinear\] the layer must not go through mlx.nn.quantize.*convert_qat"
    ):
        nn.quantize(block)


@pytest.mark.parametrize("mode", MODES)
def test_an_embedding_gives_rows_of_the_quantised_table(mode):
    table = Embedding(11, 64)
    trained = FakeQuantEmbedding(table, options(mode))
    ids = mx.array([[3, 0, -1], [10, 3, 11]])
    want = np.array(fake_quant(table.weight, mode))
    got = np.array(trained(ids))
    np.testing.assert_array_equal(got[0, :2], want[[3, 0]])
    np.testing.assert_array_equal(got[1, :2], want[[10, 3]])
    assert not got[:, 2].any()
    x = random(5, 64)
    assert mx.array_equal(trained.as_linear(x), x @ mx.array(want).T)


def test_a_tied_table_s_gradient_holds_both_uses():
    table, ids, x = Embedding(11, 64), mx.array([3, 3, 0]), random(2, 64)
    trained = FakeQuantEmbedding(table, options("int4"))

    def look_up():
        return (trained(ids) ** 3).sum()

    def multiply():
        return (trained.as_linear(x) ** 2).sum()

    def gradient(use):
        return nn.value_and_grad(trained, use)()[1]["weight"]

    first, second, both = gradient(look_up), gradient(multiply), gradient(lambda: look_up() + multiply())
    assert first.any()
    assert second.any()
    assert mx.allclose(both, first + second, rtol=1e-5, atol=1e-5)
    # The formula, with the quantised table in place of the table.
    w = float64(trained.effective_weight())
    want = 2 * (float64(x) @ w.T).T @ float64(x)
    np.add.at(want, [3, 3, 0], 3 * w[[3, 3, 0]] ** 2)
    np.testing.assert_allclose(float64(both), want, rtol=1e-4, atol=1e-5)


def experts(dtype=mx.float32):
    layer = ExpertLinear(64, 24, 3)
    layer.weight = random(3, 24, 64, seed=4).astype(dtype)
    return layer, random(4, 2, 64, seed=5).astype(dtype), mx.array([0, 0, 2, 2])


@DTYPES
@pytest.mark.parametrize("mode", MODES)
def test_each_expert_is_quantised_as_if_it_were_alone(mode, dtype):
    plain, x, chosen = experts(dtype)
    trained = FakeQuantExpertLinear(plain, options(mode))
    alone = mx.stack([fake_quant(each, mode) for each in plain.weight])
    assert mx.array_equal(trained.effective_weight(), alone)
    wanted, _, _ = experts(dtype)
    wanted.weight = alone
    for (name, want), got in zip(
        gradients(wanted, x, chosen).items(), gradients(trained, x, chosen).values(), strict=True
    ):
        assert mx.array_equal(got, want), name


@pytest.mark.parametrize("mode", MODES)
def test_another_expert_s_weights_change_no_codes_but_its_own(mode):
    layer, _, _ = experts()
    before = quantize(layer.weight, mode)
    layer.weight[1] = 7 * layer.weight[1] + 3
    after = quantize(layer.weight, mode)
    made = FakeQuantExpertLinear(layer, options(mode)).to_coded()
    assert mx.array_equal(made.weight, after[0])
    for old, new in zip(before, after, strict=True):
        if old is not None:
            assert mx.array_equal(old[::2], new[::2])
            assert not mx.array_equal(old[1], new[1])


def test_inputs_of_experts_are_quantised_row_by_row():
    layer, x, chosen = experts()
    got = FakeQuantExpertLinear(layer, options("int8"), activations="int8")(x, chosen)
    rows = float64(x)
    scale = np.abs(rows).max(axis=-1, keepdims=True) / 127
    weight = float64(fake_quant(layer.weight, "int8"))
    want = np.einsum("mrk,mok->mro", scale * np.rint(rows / scale), weight[np.array(chosen)])
    np.testing.assert_allclose(float64(got), want, rtol=1e-4, atol=1e-4)


def test_what_a_width_must_be_a_multiple_of():
    wanted = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16, "int8": 4, "int4": 8, "ternary": 32, "fp8_e4m3": 4}
    assert {mode: columns_multiple(options(mode)) for mode in MODES} == wanted


def test_ternary_becomes_groups_of_32_where_64_do_not_divide():
    layer = Linear(96, 8, bias=False)
    made = FakeQuantLinear(layer, options("ternary")).to_coded()
    assert isinstance(made, QuantizedLinear)
    assert (made.mode, made.bits, made.group_size) == ("affine", 2, 32)
    assert mx.array_equal(made.effective_weight(), fake_quant(layer.weight, "ternary"))
