"""The layers of codes: the codes are those of quantize, and stand for the weight that was trained."""

from forge_mlx.kernels import fake_quant, quantize
from forge_mlx.kernels.quantize.options import MODES, checked_options
from forge_mlx.nn import (
    Embedding,
    ExpertLinear,
    FakeQuantEmbedding,
    FakeQuantExpertLinear,
    FakeQuantLinear,
    Linear,
)
from forge_mlx.nn.quantized import coded_layer
from forge_mlx.nn.weight_format import MLX_MODES, WeightFormat
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
FORMATS = [
    *(("affine", {"bits": bits, "group_size": 32}) for bits in (2, 3, 4, 5, 6, 8)),
    *(("affine", {"bits": 4, "group_size": size}) for size in (64, 128)),
    *((mode, {}) for mode in MODES if mode != "affine"),
    ("ternary", {"granularity": "row"}),
    ("fp8_e4m3", {"granularity": "tensor"}),
]
EACH_FORMAT = pytest.mark.parametrize(
    ("mode", "chosen"), FORMATS, ids=[" ".join(map(str, [m, *c.values()])) for m, c in FORMATS]
)


def options(mode, bits=None, group_size=None, granularity=None):
    return checked_options("test", mode, bits, group_size, granularity)


def random(*shape, seed=0, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def float64(array):
    return np.array(array.astype(mx.float32), dtype=np.float64)


def trained(kind, mode, chosen, dtype, activations=None, width=128):
    """A fake-quantised layer and inputs of it."""
    made = options(mode, **chosen)
    if kind == "linear":
        layer = FakeQuantLinear(Linear(width, 24), made, activations=activations)
        inputs = (random(5, width, dtype=dtype),)
        layer.weight = random(24, width, seed=1)
        layer.bias = random(24, seed=2)
    elif kind == "embedding":
        layer, inputs = FakeQuantEmbedding(Embedding(24, width), made), (mx.array([[0, 23, -1], [24, 5, 5]]),)
        layer.weight = random(24, width, seed=1)
    else:
        layer = FakeQuantExpertLinear(ExpertLinear(width, 24, 3), made, activations=activations)
        inputs = (random(4, 2, width, dtype=dtype), mx.array([0, 0, 2, 2]))
        layer.weight = random(3, 24, width, seed=1) * mx.array([1.0, 10.0, 0.1])[:, None, None]
    layer.set_dtype(dtype)
    return layer, inputs


@DTYPES
@EACH_FORMAT
@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_codes_are_those_of_quantize_and_stand_for_the_trained_weight(kind, mode, chosen, dtype):
    layer, _ = trained(kind, mode, chosen, dtype)
    made, want = layer.to_coded(), fake_quant(layer.weight, mode, **chosen)
    codes, scales, biases = quantize(layer.weight, mode, **chosen)
    assert mx.array_equal(made.weight, codes)
    if mode == "ternary":
        assert mx.array_equal(made.scales, mx.broadcast_to(scales.astype(dtype), made.scales.shape))
        assert mx.array_equal(made.biases, -made.scales)
    else:
        assert mx.array_equal(made.scales, scales)
        assert biases is None or mx.array_equal(made.biases, biases)
    assert made.effective_weight().dtype == dtype
    assert mx.array_equal(made.effective_weight(), want)
    assert made.trainable_parameters() == {}
    if made.mode in MLX_MODES:
        values = mx.dequantize(*made.packed(), made.group_size, made.bits, made.mode, dtype=dtype, stream=mx.cpu)
        assert mx.array_equal(values, want)


@pytest.mark.parametrize("kind", ["linear", "embedding", "experts"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "int8"])
def test_codes_never_become_trainable(kind, mode):
    made = trained(kind, mode, {}, mx.float32)[0].to_coded()
    model = nn.Module()
    model.layer = made
    rest = ["bias"] if "bias" in made else []
    for unfreeze in (model.unfreeze, lambda: model.unfreeze(keys=["weight", "scales", "biases", "bias"])):
        model.freeze()
        unfreeze()
        assert list(model.trainable_parameters()["layer"]) == rest


@DTYPES
@EACH_FORMAT
def test_rows_of_an_embedding_of_codes_are_those_of_training(mode, chosen, dtype):
    layer, inputs = trained("embedding", mode, chosen, dtype)
    made = layer.to_coded()
    got, want = made(*inputs), layer(*inputs)
    assert got.dtype == want.dtype == dtype
    assert mx.array_equal(got, want)
    assert isinstance(made, nn.QuantizedEmbedding) == (mode in MLX_MODES or mode == "ternary")


@DTYPES
@EACH_FORMAT
def test_a_product_with_one_element_gives_a_trained_weight_to_the_bit(mode, chosen, dtype):
    """What MLX's product on a CPU makes of codes, seen one by one: nothing is summed that could hide a difference."""
    layer, _ = trained("linear", mode, chosen, dtype)
    made = layer.to_coded()
    del made.bias
    with mx.stream(mx.cpu):
        assert mx.array_equal(made(mx.eye(128, dtype=dtype)), layer.effective_weight().T)


def terms(layer, made, inputs):
    """In float64: the product of training; sums of |x| |q s|, |x| |b| and |x| |W'|, with W' = q s + b rounded."""
    x, weight = float64(layer._input(inputs[0])), float64(layer.effective_weight())
    biases = np.zeros_like(weight) if made.biases is None else float64(mx.repeat(made.biases, made.group_size, axis=-1))
    names = "nk,ok->no" if len(inputs) == 1 else "mrk,mok->mro"
    of_rows = slice(None) if len(inputs) == 1 else np.array(inputs[1])
    sizes = [np.einsum(names, np.abs(x), np.abs(each)[of_rows]) for each in (weight - biases, biases, weight)]
    return np.einsum(names, x, weight[of_rows]), *sizes


@DTYPES
@EACH_FORMAT
@pytest.mark.parametrize("activations", [None, "int8"], ids=["float input", "int8 input"])
@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_a_product_differs_from_that_of_training_by_roundings_alone(kind, activations, mode, chosen, dtype):
    """|codes' - trained| <= n u / (1 - n u) sum |x| (|q s| + |b|), n = K + 3, u the unit roundoff of the dtype.

    On a CPU MLX computes all in the dtype: for each element it rounds q s, + b, the product with x, and at most K sums.
    That of training rounds W' = q s + b just so, and the sum once. With n u near 1 this would say nothing: in 16 bits K
    is 32.
    """
    width = 128 if dtype == mx.float32 else 32
    if options(mode, **chosen).columns_multiple > width:
        chosen = chosen | {"group_size": 32}
    layer, inputs = trained(kind, mode, chosen, dtype, activations, width=width)
    layer.pop("bias", None)
    made = layer.to_coded()
    exact, of_scaled, of_biases, _ = terms(layer, made, inputs)
    roundings = (width + 3) * ROUNDOFF[dtype]
    bound = roundings / (1 - roundings) * (of_scaled + of_biases)
    with mx.stream(mx.cpu):
        got, want = made(*inputs), layer(*inputs)
    assert got.dtype == want.dtype == dtype
    assert (np.abs(float64(got) - exact) <= bound).all()
    assert (np.abs(float64(got) - float64(want)) <= bound).all()
    if mode in ("int8", "int4", "fp8_e4m3"):
        assert mx.array_equal(got, want)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@EACH_FORMAT
def test_a_product_that_is_summed_in_float32_differs_by_what_the_weight_is_not_rounded(mode, chosen, dtype):
    """|codes' - trained| <= u (sum |x| |q s| + sum |x| |W'|) and float32's own roundings, u that of the dtype.

    So MLX's GPU kernels compute, and its CPU code with float32 inputs: q s + b is never rounded to the dtype of the
    scales, where W' was rounded twice.
    """
    layer, inputs = trained("linear", mode, chosen, dtype)
    layer.pop("bias", None)
    made = layer.to_coded()
    inputs = [each.astype(mx.float32) for each in inputs]
    exact, of_scaled, of_biases, of_weights = terms(layer, made, inputs)
    of_sums = 2 * (128 + 3) * ROUNDOFF[mx.float32] * (of_scaled + of_biases)
    bound = ROUNDOFF[dtype] * (of_scaled + of_weights) + of_sums
    assert (np.abs(float64(made(*inputs)) - exact) <= bound).all()


@EACH_FORMAT
def test_the_table_as_output_layer(mode, chosen):
    layer, _ = trained("embedding", mode, chosen, mx.float32)
    x = random(2, 5, 128)
    assert mx.allclose(layer.to_coded().as_linear(x), layer.as_linear(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["linear", "embedding", "experts"])
def test_no_rows(kind, mode):
    """MLX's quantised product of no rows ends the process."""
    layer, _ = trained(kind, mode, {}, mx.float32)
    made = layer.to_coded()
    if kind == "linear":
        assert made(mx.zeros((0, 128))).shape == (0, 24)
        assert mx.allclose(made(mx.ones(128)), layer(mx.ones(128)), rtol=1e-4, atol=1e-4)
    elif kind == "embedding":
        assert made.as_linear(mx.zeros((2, 0, 128))).shape == (2, 0, 24)
        assert made(mx.zeros((0,), mx.int32)).shape == (0, 128)
    else:
        assert made(mx.zeros((0, 2, 128)), mx.zeros((0,), mx.int32)).shape == (0, 2, 24)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["linear", "embedding", "experts"])
def test_empty_layers_have_the_shapes_and_dtypes_of_full_ones(kind, mode):
    layer, _ = trained(kind, mode, {}, mx.float16)
    full = layer.to_coded()
    empty = coded_layer(layer, None, full.format)
    assert type(empty) is type(full)
    assert repr(empty) == repr(full)
    for name, array in full.parameters().items():
        assert empty[name].shape == array.shape
        assert empty[name].dtype == array.dtype


def test_what_is_no_layer_with_a_weight_is_refused():
    with pytest.raises(ValueError, match=r"\[coded_layer\] layer must be a Linear, an Embedding or .* got RMSNorm\."):
        coded_layer(nn.RMSNorm(4), None, WeightFormat(options("int8"), mx.float32))


def test_nan_in_a_weight_stays_nan():
    layer, inputs = trained("linear", "affine", {"group_size": 32}, mx.float32)
    layer.weight[3, 40] = float("nan")
    found = mx.isnan(layer.to_coded().effective_weight())
    assert found[3, 32:64].all()
    assert found.sum() == 32
    assert mx.isnan(layer.to_coded()(*inputs))[:, 3].all()
