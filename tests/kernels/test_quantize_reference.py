"""quantize's formulas in plain operations against NumPy, bit for bit, and the formats' definitions against PyTorch."""

from forge_mlx.kernels import dequantize, fake_quant, quantize
from forge_mlx.kernels._common.proof import compare, to_float64
from forge_mlx.kernels.quantize import cases, elements, exact, packing, reference, scales
from forge_mlx.kernels.quantize.options import MODES, checked_options
import mlx.core as mx
import numpy as np
import pytest
from quantize_proofs import NAMES, VARIANTS, bits_of
from room_proofs import random, thinned
import torch

MLX_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


def same(got, want):
    """Whether two arrays have the same bits, of float32 if they are floats; one NaN is as another."""
    return got.shape == want.shape and np.array_equal(bits_of(got), bits_of(want))


@pytest.mark.parametrize("case", VARIANTS, **NAMES)
def test_codes_scales_values_and_clipping_are_those_of_numpy(case):
    w, dout, options = case.weights(), case.cotangent(), case.options
    codes, scale, biases = reference.quantize(w, options)
    # The sum of a mean has no defined order: its own test has the 2 ulp.
    expected = case.oracle(np.array(scale) if case.mode == "ternary" else None)
    assert (codes.dtype, scale.dtype) == (mx.uint32, options.scale_dtype(w.dtype))
    assert np.array_equal(np.array(codes), exact.pack(expected.codes, options.bits))
    assert same(scale, expected.scales)
    assert biases is None if expected.biases is None else same(biases, expected.biases)
    for values in (reference.fake_quant(w, options), reference.dequantize(codes, scale, biases, options, w.dtype)):
        assert values.dtype == w.dtype
        assert same(values, expected.values)
    dw = reference.clip_backward(w, dout, options)
    assert same(dw, np.where(expected.is_clipped, np.float32(0), np.array(dout.astype(mx.float32))))


@pytest.mark.parametrize(
    "case", thinned(cases.CASES, lambda case: case.shape == (5, 256), every=4), ids=lambda c: c.name
)
def test_cases_expect_what_the_formula_gives(case):
    formula = case.run("formula")
    assert compare(case, formula) == []
    for name, truth in case.expected().items():
        if name in ("codes", "dw") or case.options.scale_dtype(case.dtype) == mx.uint8:
            assert np.abs(to_float64(formula[name]) - truth).max(initial=0) <= 2.0**-8 * np.abs(truth).max(initial=0)
        if name == "codes":
            assert np.array_equal(np.array(formula[name]), truth)


@pytest.mark.parametrize("values", ["normal", "spike", "ranges", "1e-30", "1e30"])
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (3, 4112), (256, 4096), (2, 33, 80), (4096, 16)], ids=str)
def test_ternary_scale_is_the_mean_within_2_ulp(shape, values):
    for granularity, axes in (("tensor", (-2, -1)), ("row", -1)):
        case = cases.QuantizeCase(shape, "ternary", granularity=granularity, values=values)
        mean = np.abs(to_float64(case.weight())).mean(axis=axes, keepdims=True)
        found = to_float64(case.run("formula")["scales"])
        assert (np.abs(found - mean) <= 2 * np.spacing(mean.astype(np.float32))).all(), granularity


def test_mean_of_numbers_whose_sum_leaves_float32():
    assert quantize(mx.full((64, 64), 3e38), "ternary")[1].item() == np.float32(3e38)


def test_e4m3_rounds_as_pytorch():
    # All that are near a number, near the middle of two, near 2^-10 and 464, and -0.
    table = np.array(elements.E4M3[:-1], np.float32)
    middles = np.append((table[1:] + table[:-1]) / 2, np.float32(464))
    x = np.concatenate([table, middles, [480, 1e30, 1e-30]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
    x = np.concatenate([x, -x])
    rounded = torch.from_numpy(x.clip(-448, 448)).to(torch.float8_e4m3fn)
    ours = elements.to_e4m3(mx.array(x))
    assert same(ours, rounded.to(torch.float32).numpy())
    assert np.array_equal(np.array(elements.e4m3_codes(ours)), rounded.view(torch.uint8).numpy())
    every = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(every).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    assert same(elements.e4m3_numbers(mx.array(every)), theirs)


# The first place, in units of the scale, whose nearest number on the unlimited grid has no code.
FIRST_CLIPPED = {
    "ternary": 1.5,
    "int4": 7.5,
    "int8": 127.5,
    "nvfp4": 7.0,
    "fp8_e4m3": np.nextafter(np.float32(464), np.float32(465)),
    "affine": 15.5,
}


@pytest.mark.parametrize("mode", FIRST_CLIPPED)
def test_clipping_begins_where_the_next_number_would_be_nearest(mode):
    first = np.float32(FIRST_CLIPPED[mode])
    x = mx.array(np.array([first, np.nextafter(first, np.float32(0)), 0, 1e6], np.float32))
    options = checked_options("test", mode, None, None, None)
    assert elements.is_clipped(x, options).tolist() == [True, False, False, True]
    if mode != "affine":
        assert elements.is_clipped(-x, options).tolist() == [True, False, False, True]


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_mx_scale_is_the_smallest_that_holds_the_largest_weight(mode):
    largest = {"mxfp4": 6.0, "mxfp8": 448.0}[mode]
    exponents = np.arange(-126, 128 - int(np.log2(largest)) - 1)
    full = (largest * 2.0**exponents).astype(np.float32)
    for numbers, more in (
        (full, 0),
        (np.nextafter(full, np.float32(np.inf)), 1),
        (np.nextafter(full, np.float32(0)), 0),
    ):
        w = np.zeros((len(numbers), 32), np.float32)
        w[:, 7] = -numbers
        found = quantize(mx.array(w), mode)[1]
        assert np.array_equal(np.array(found)[:, 0], exponents + 127 + more)
    assert to_float64(scales.e8m0_value(mx.arange(255).astype(mx.uint8))).tolist() == [2.0**e for e in range(-127, 128)]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing_is_a_stream_of_bits_and_unpacking_its_inverse(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 2, 96))
    words = packing.pack(mx.array(codes), bits)
    assert words.shape == (3, 2, 3 * bits)
    assert np.array_equal(np.array(words), exact.pack(codes, bits))
    assert np.array_equal(np.array(packing.unpack(words, bits)), codes)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_makes_its_group_nan_and_nothing_else(mode, value):
    options = checked_options("test", mode, None, None, None)
    w = np.random.default_rng(0).normal(size=(2, 3, 128)).astype(np.float32)
    w[1, 2, 70] = value
    group = options.group_size or 128
    hit = np.zeros(w.shape, bool)
    hit[1, 2, 70 // group * group : 70 // group * group + group] = True
    if options.granularity == "tensor":
        hit[1] = True
    codes, scale, biases = quantize(mx.array(w), mode)
    results = [fake_quant(mx.array(w), mode), dequantize(codes, scale, biases, mode=mode, dtype=mx.float32)]
    if mode in MLX_MODES:
        results += [
            mx.dequantize(codes, scale, biases, options.group_size, options.bits, mode, dtype=dtype)
            for dtype in (mx.float32, mx.float16, mx.bfloat16)
        ]
    for each in results:
        assert np.array_equal(np.isnan(np.array(each.astype(mx.float32))), hit)
    assert (np.array(packing.unpack(codes, options.bits))[hit] == elements.zero_code(options)).all()


@pytest.mark.parametrize("mode", MODES)
def test_zeros_stay_zeros(mode):
    w = random((2, 4, 128), 0) * (mx.arange(128) % 3 == 0)
    w[1, 2] = 0
    values = fake_quant(w, mode)
    # An affine zero is code * scale + bias, of which the scale is rounded.
    most = 1e-6 if mode == "affine" else 0
    assert mx.where(w == 0, mx.abs(values), 0).max().item() <= most
    assert not values[1, 2].any().item()


@pytest.mark.parametrize("mode", ["ternary", "fp8_e4m3"])
def test_each_matrix_has_a_scale_of_its_own(mode):
    w = random((3, 5, 64), 0) * mx.array([1.0, 10.0, 100.0])[:, None, None]
    codes, scale, _ = quantize(w, mode, granularity="tensor")
    assert scale.shape == (3, 1, 1)
    for index in range(3):
        alone = quantize(w[index], mode, granularity="tensor")
        assert mx.array_equal(codes[index], alone[0])
        assert mx.array_equal(scale[index], alone[1])


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_ternary_codes_are_mlxs_affine_codes_of_two_bits(dtype, granularity):
    w = random((4, 256), 1, dtype)
    codes, scale, _ = quantize(w, "ternary", granularity=granularity)
    each = mx.broadcast_to(scale, (4, 4)).astype(dtype)
    theirs = mx.dequantize(codes, each, -each, group_size=64, bits=2)
    assert mx.array_equal(theirs, fake_quant(w, "ternary", granularity=granularity))
