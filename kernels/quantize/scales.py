"""The scales of every mode: one for each group, row or matrix, and what an element is in units of its own."""

from dataclasses import dataclass
import math
from typing import Final

from forge_mlx.kernels.quantize.elements import e4m3_codes, to_e4m3
from forge_mlx.kernels.quantize.options import Options
import mlx.core as mx

# The largest number that has a code.
_LARGEST: Final = {"int8": 127, "int4": 7, "fp8_e4m3": 448}

_INFINITE_BITS: Final = 0x7F800000
# What K is a multiple of in the mode ternary.
_CHUNK: Final = 16
# The least step of a group in the mode affine.
_EPS: Final = 1e-7


@dataclass(frozen=True)
class Scaled:
    """Weights in units of their scales.

    Attributes:
        x: (w - bias) / scale, float32 `[..., G, g]`: G groups of g neighbours; of a whole row G is 1.
        scale: What is stored, of the dtype that `Options.scale_dtype` names, `[..., G, 1]` or, of one for the last two
            axes of w, `[..., 1, 1, 1]`.
        factor: The number that `scale` stands for, float32. NaN where the group holds NaN or an infinity; x then is
            anything.
        bias: In the dtype of w, `[..., G, 1]`; None but for affine.
    """

    x: mx.array
    scale: mx.array
    factor: mx.array
    bias: mx.array | None = None


def scaled(w: mx.array, options: Options) -> Scaled:
    """The scales of w by the mode's formula, all in float32, and w in units of them.

    Args:
        w: `[..., K]`, not empty.
        options: The mode.
    """
    values = w.astype(mx.float32).reshape(*w.shape[:-1], -1, options.group_size or w.shape[-1])
    if options.mode == "affine":
        return _affine(values, w.dtype, options.bits)
    if options.mode == "ternary":
        return _float_scaled(values, _mean_magnitude(values, options))
    largest = _largest_magnitude(values, options)
    if options.mode in ("mxfp4", "mxfp8"):
        return _e8m0_scaled(values, largest, options)
    if options.mode == "nvfp4":
        return _e4m3_scaled(values, largest)
    return _float_scaled(values, largest / _LARGEST[options.mode])


def e8m0_value(scale: mx.array) -> mx.array:
    """2^(byte - 127), and NaN for 255.

    Args:
        scale: uint8.

    Returns:
        float32.
    """
    # 2^-127 is subnormal, and so not an exponent alone.
    bits = mx.where(scale == 0, 0x400000, scale.astype(mx.int32) << 23)
    return mx.where(scale == 255, math.nan, mx.view(bits, mx.float32))


def _affine(values: mx.array, dtype: mx.Dtype, bits: int) -> Scaled:
    """From the end of the range that is farther from 0, which becomes a whole number of steps away from it."""
    high, low = mx.max(values, axis=-1, keepdims=True), mx.min(values, axis=-1, keepdims=True)
    is_low_farther = mx.abs(low) > mx.abs(high)
    step = mx.maximum((high - low) / (2**bits - 1), _EPS)
    step = mx.where(is_low_farther, step, -step)
    edge = mx.where(is_low_farther, low, high)
    steps = mx.round(edge / step)
    has_bias = steps != 0
    step, bias = mx.where(has_bias, edge / steps, step), mx.where(has_bias, edge, 0.0)
    is_finite = mx.isfinite(high) & mx.isfinite(low)
    scale = mx.where(is_finite, step, math.nan).astype(dtype)
    bias_stored = mx.where(is_finite, bias, math.nan).astype(dtype)
    return Scaled((values - bias) / step, scale, scale.astype(mx.float32), bias_stored)


def _e8m0_scaled(values: mx.array, largest: mx.array, options: Options) -> Scaled:
    """The smallest power of two that is `largest` / 6 or / 448 or more and has a byte; 1 where all is 0."""
    bits = mx.view(largest, mx.int32)
    # By integers: a GPU may round a quotient otherwise, or to 0. 6 is 1.5 * 2^2 and 448 is 1.75 * 2^8; a mantissa
    # above 1.5 or 1.75 carries into the exponent.
    carry, exponent = (0x3FFFFF, 2) if options.mode == "mxfp4" else (0x1FFFFF, 8)
    byte = mx.maximum(((bits + carry) >> 23) - exponent, 0)
    byte = mx.where(bits == 0, 127, mx.where(bits < _INFINITE_BITS, byte, 255))
    scale = byte.astype(mx.uint8)
    inverse = mx.view((254 - mx.minimum(byte, 253)) << 23, mx.float32)
    return Scaled(values * inverse, scale, e8m0_value(scale))


def _e4m3_scaled(values: mx.array, largest: mx.array) -> Scaled:
    """`largest` / 6 to the nearest e4m3, halves to even, 448 at most."""
    factor = mx.where(largest < math.inf, to_e4m3(largest / 6), math.nan)
    scale = mx.where(mx.isnan(factor), mx.array(0x7F, mx.uint8), e4m3_codes(factor))
    return Scaled(_divided(values, factor), scale, factor)


def _float_scaled(values: mx.array, scale: mx.array) -> Scaled:
    scale = mx.where(scale < math.inf, scale, math.nan)
    return Scaled(_divided(values, scale), scale, scale)


def _divided(values: mx.array, factor: mx.array) -> mx.array:
    """0, with its sign, where the factor is 0."""
    return values / mx.where(factor == 0, math.inf, factor)


def _largest_magnitude(values: mx.array, options: Options) -> mx.array:
    # Not the maximum of magnitudes: that is a pass more. NaN stays in both.
    high, low = mx.max(values, axis=-1, keepdims=True), mx.min(values, axis=-1, keepdims=True)
    largest = mx.abs(mx.maximum(high, -low))
    return mx.max(largest, axis=(-3, -2), keepdims=True) if options.granularity == "tensor" else largest


def _mean_magnitude(values: mx.array, options: Options) -> mx.array:
    """mean(abs(w)) within 2 ulp, however many they are; no sum overflows."""
    unit = mx.view(mx.view(_largest_magnitude(values, options), mx.int32) & _INFINITE_BITS, mx.float32)
    unit = mx.where(unit == 0, 1.0, unit)
    chunks = mx.abs(values / unit).reshape(*values.shape[:-1], -1, _CHUNK)
    # Of numbers below 2, as `_sum` has it.
    upper = (chunks + 2 * _CHUNK) - 2 * _CHUNK
    total, count = _sum(mx.sum(upper, axis=-1) + mx.sum(chunks - upper, axis=-1)), values.shape[-1]
    if options.granularity == "tensor":
        total, count = mx.swapaxes(_sum(mx.swapaxes(total, -1, -3)), -1, -3), count * values.shape[-3]
    return total / count * unit


def _sum(terms: mx.array) -> mx.array:
    """The sum over the last axis, rounded about once.

    The upper digits of each term, cut at a place that is the same for all, have a sum without error in any order
    (Rump, Ogita and Oishi 2008); the lower digits are too small for theirs to matter.

    Args:
        terms: `[..., N]`, not negative.

    Returns:
        `[..., 1]`.
    """
    cut = 2.0 ** math.ceil(math.log2(terms.shape[-1])) * _power_of_two_above(mx.max(terms, axis=-1, keepdims=True))
    upper = (terms + cut) - cut
    return mx.sum(upper, axis=-1, keepdims=True) + mx.sum(terms - upper, axis=-1, keepdims=True)


def _power_of_two_above(x: mx.array) -> mx.array:
    """The next power of two above float32 numbers that are not negative."""
    return mx.view((mx.view(x, mx.int32) + 0x800000) & _INFINITE_BITS, mx.float32)
