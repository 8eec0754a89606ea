"""quantize beside mx.quantize on the CPU: affine bit for bit, the fp4 and fp8 modes off ties."""

from dataclasses import replace

from forge_mlx.kernels import dequantize, fake_quant, quantize
import mlx.core as mx
import numpy as np
import pytest
from quantize_proofs import DTYPES, KINDS, NAMES, QuantizeCase

FINITE = tuple(kind for kind in KINDS if kind != "not finite")
AFFINE = [
    QuantizeCase("affine", dtype, bits, size, kinds=FINITE)
    for dtype in DTYPES
    for bits in (2, 3, 4, 5, 6, 8)
    for size in (32, 64, 128)
]
# MLX writes other codes for numbers that are not normal in float32, and in 16 bits it rounds quotients to the dtype.
FLOATING = [
    QuantizeCase(mode, dtype, kinds=("normal", "constant", "zeros", "positive", "negative"), rows=64)
    for mode in ("mxfp4", "mxfp8", "nvfp4")
    for dtype in DTYPES
]
NUMBERS = {
    "mxfp4": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "mxfp8": np.unique(np.array(mx.from_fp8(mx.arange(127).astype(mx.uint8), mx.float32))),
}
NUMBERS["nvfp4"] = NUMBERS["mxfp4"]


def by_mlx(w, options):
    return mx.quantize(w, options.group_size, options.bits, options.mode, stream=mx.cpu)


def values_by_mlx(arrays, options, dtype):
    codes, scales, biases = (*arrays, None)[:3]
    return mx.dequantize(
        codes, scales, biases, options.group_size, options.bits, options.mode, dtype=dtype, stream=mx.cpu
    )


@pytest.mark.parametrize("case", AFFINE, **NAMES)
def test_affine_equals_mlx_bit_for_bit(case):
    w = case.weights()
    ours, theirs = quantize(w, "affine", bits=case.bits, group_size=case.group_size), by_mlx(w, case.options)
    for name, mine, other in zip(("codes", "scales", "biases"), ours, theirs, strict=True):
        assert mine.dtype == other.dtype, name
        assert mx.array_equal(mine, other), name
    values = fake_quant(w, "affine", bits=case.bits, group_size=case.group_size)
    assert mx.array_equal(values, values_by_mlx(theirs, case.options, case.dtype))


def test_affine_of_a_range_beyond_float32_is_that_of_mlx():
    w = mx.array(np.linspace(-3e38, 3e38, 64, dtype=np.float32)[None].repeat(2, axis=0))
    ours, theirs = quantize(w, "affine"), mx.quantize(w, stream=mx.cpu)
    assert all(mx.array_equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert mx.all(mx.isnan(fake_quant(w, "affine"))).item()
    assert mx.all(mx.isnan(mx.dequantize(*theirs))).item()


@pytest.mark.parametrize("case", FLOATING, **NAMES)
def test_fp4_and_fp8_equal_mlx_off_ties(case):
    w, options, numbers = case.weights(), case.options, NUMBERS[case.mode]
    codes, scales, _ = quantize(w, case.mode)
    their_codes, their_scales = by_mlx(w, options)
    is_same_scale = np.array(scales == their_scales).repeat(options.group_size, axis=-1)
    # A scale of e4m3 is itself rounded, by MLX from a quotient in the dtype of w.
    assert is_same_scale.mean() > (0.95 if case.mode == "nvfp4" else 0.9999)
    # The codes of 1 give the scales themselves.
    ones = mx.full(codes.shape, 0x22222222 if options.bits == 4 else 0x38383838, mx.uint32)
    unit = np.array(dequantize(ones, scales, mode=case.mode, dtype=mx.float32))
    x = np.abs(np.array(w.astype(mx.float32))) / np.where(unit == 0, np.inf, unit)
    middles = (numbers[1:] + numbers[:-1]) / 2
    distance = np.abs(x[..., None] - middles).min(axis=-1) / np.maximum(x, 1e-9)
    is_far = distance > {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[case.dtype]
    ours, theirs = (np.array(values) for values in (unpacked(codes, options.bits), unpacked(their_codes, options.bits)))
    where = is_far & is_same_scale
    assert where.mean() > 0.5
    assert np.array_equal(ours[where], theirs[where])


def unpacked(codes, bits):
    words = np.array(codes)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).reshape(*words.shape[:-1], -1)


@pytest.mark.parametrize("case", FLOATING, **NAMES)
def test_mlx_reads_our_codes_as_the_weight_that_was_trained(case):
    w = case.weights()
    codes, scales, _ = quantize(w, case.mode)
    assert mx.array_equal(values_by_mlx((codes, scales), case.options, case.dtype), fake_quant(w, case.mode))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
def test_affine_values_in_another_dtype_than_the_scales(scale_dtype, dtype):
    arrays = quantize(QuantizeCase("affine", scale_dtype, kinds=("normal",)).weights(), "affine")
    theirs = mx.dequantize(*arrays, dtype=dtype, stream=mx.cpu)
    assert mx.array_equal(dequantize(*arrays, mode="affine", dtype=dtype), theirs)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_defaults_are_those_of_mlx(mode):
    w = QuantizeCase(mode, kinds=("normal",)).weights()
    for mine, other in zip(quantize(w, mode), (*mx.quantize(w, mode=mode, stream=mx.cpu), None), strict=False):
        assert mine is other is None or (mine.shape, mine.dtype) == (other.shape, other.dtype)


def test_matrices_and_experts_are_alike():
    case = QuantizeCase("affine", mx.bfloat16, kinds=("normal", "wide"))
    w = case.weights()
    assert w.ndim == 3
    for index in range(2):
        alone = replace(case, kinds=(case.kinds[index],))
        assert mx.array_equal(quantize(w, "affine")[0][index], mx.quantize(w[index], stream=mx.cpu)[0]), alone.kinds
