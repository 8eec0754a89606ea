"""Every mode of quantize in NumPy, from the formulas alone: what the room is judged by, sharing none of its code.

Scales and quotients are exactly rounded float32, as the formulas say, for another precision has other ties; the nearest
number is searched for in float64.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from forge_mlx.kernels.quantize.options import Options
import mlx.core as mx
import numpy as np

_LARGEST: Final = {"mxfp4": 6.0, "mxfp8": 448.0, "int8": 127.0, "int4": 7.0, "ternary": 1.0, "fp8_e4m3": 448.0}
# Codes from 0 up and what they stand for; the sign is a bit above. e4m3 has no infinity, and its last code is NaN.
_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E4M3: Final = np.array(
    [2.0**-9 * m for m in range(8)] + [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8)]
)[:-1]


@dataclass(frozen=True)
class Exact:
    """What quantize makes of weights.

    Attributes:
        codes: uint32 `[..., K]`, one each, not packed.
        scales: As the op returns them: float32, or uint8 in mxfp4, mxfp8 and nvfp4.
        biases: float32 as the op returns them; None but for affine.
        values: `[..., K]` that the codes stand for: float32 as the weight's dtype has rounded them, or float64.
        is_clipped: `[..., K]`, where the nearest number of the same spacing has no code.
    """

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None
    values: np.ndarray
    is_clipped: np.ndarray


def quantize(w: np.ndarray, options: Options, dtype: mx.Dtype | None = None, scales: np.ndarray | None = None) -> Exact:
    """Codes, scales and values of weights.

    Args:
        w: `[..., K]`, float32, numbers of the weight's dtype.
        options: The mode.
        dtype: The weight's, to which affine scales, biases and all values are rounded; None: none is.
        scales: Instead of the ternary mean, whose sum has no defined order.
    """
    if w.size == 0:
        none, no_scales = np.zeros(w.shape), np.zeros(options.scales_shape(w.shape))
        return Exact(none, no_scales, no_scales if options.has_biases else None, none, none > 0)
    with np.errstate(all="ignore"):
        if options.group_size is None:
            found = _of_rows(w, options, dtype, scales)
        else:
            kind = {"affine": _affine, "nvfp4": _nvfp4}.get(options.mode, _mx)
            found = kind(w.reshape(*w.shape[:-1], -1, options.group_size), options, dtype)
            biases = None if found.biases is None else found.biases[..., 0]
            found = replace(found, scales=found.scales[..., 0], biases=biases)
    codes, values, is_clipped = (each.reshape(w.shape) for each in (found.codes, found.values, found.is_clipped))
    return replace(found, codes=codes.astype(np.uint32), values=values, is_clipped=is_clipped)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """`[..., K]` -> `[..., K * bits / 32]` in uint32: code after code, each and all from the lowest bit up.

    Args:
        codes: One each.
        bits: Bits of a code.
    """
    stream = (codes[..., None].astype(np.uint32) >> np.arange(bits, dtype=np.uint32)) & 1
    words = stream.reshape(*codes.shape[:-1], -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    packed: np.ndarray = words.sum(axis=-1).astype(np.uint32)
    return packed


def _rounded(x: np.ndarray, dtype: mx.Dtype | None) -> np.ndarray:
    """Rounded to a dtype, halves to even, and widened to float32 again; without a dtype float64.

    A sum or product of two float32 numbers in float64 has the same float32 as the exact one.
    """
    if dtype is None:
        return x.astype(np.float64)
    x = x.astype(np.float32)
    if dtype == mx.float32:
        return x
    if dtype == mx.float16:
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def _product(numbers: np.ndarray, scale: np.ndarray, dtype: mx.Dtype | None) -> np.ndarray:
    return _rounded(numbers.astype(np.float64) * scale.astype(np.float64), dtype)


def _nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code of the number in an ascending table that is nearest to |x|; of two, the even code."""
    magnitude = np.abs(x.astype(np.float64))
    above = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    below = above - 1
    up, down = table[above] - magnitude, magnitude - table[below]
    return np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)


def _affine(groups: np.ndarray, options: Options, dtype: mx.Dtype | None) -> Exact:
    last = np.float32(2**options.bits - 1)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    is_low = np.abs(low) > np.abs(high)
    step = np.maximum((high - low) / last, np.float32(1e-7))
    step = np.where(is_low, step, -step)
    edge = np.where(is_low, low, high)
    count = np.rint(edge / step)
    scale = np.where(count != 0, edge / np.where(count == 0, np.float32(1), count), step)
    bias = np.where(count != 0, edge, np.float32(0))
    steps = np.rint((groups - bias) / scale)
    is_finite = np.isfinite(groups).all(axis=-1, keepdims=True)
    codes = np.where(is_finite, np.clip(steps, 0, last), 0)
    scale, bias = (_rounded(np.where(is_finite, each, np.nan), dtype) for each in (scale, bias))
    values = _rounded(_product(codes, scale, dtype).astype(np.float64) + bias, dtype)
    return Exact(codes, scale, bias, values, (steps < 0) | (steps > last))


def _mx(groups: np.ndarray, options: Options, dtype: mx.Dtype | None) -> Exact:
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    is_finite = np.isfinite(largest)
    # The smallest power of two that brings the largest magnitude into the codes' range, of what e8m0 has; 1 for zeros.
    limits = _LARGEST[options.mode] * 2.0 ** np.arange(-127, 128)
    exponent = np.where(largest == 0, 0, np.searchsorted(limits, largest.astype(np.float64)) - 127)
    scale = np.where(is_finite, 2.0 ** np.where(is_finite, exponent, 0), np.nan)
    codes, numbers = (_e2m1 if options.mode == "mxfp4" else _e4m3)(np.where(is_finite, groups / scale, 0))
    stored = np.where(is_finite, exponent + 127, 255).astype(np.uint8)
    return Exact(codes, stored, None, _product(numbers, scale, dtype), np.zeros(groups.shape, bool))


def _nvfp4(groups: np.ndarray, _options: Options, dtype: mx.Dtype | None) -> Exact:
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    is_finite = np.isfinite(largest)
    stored = np.where(is_finite, _nearest(np.where(is_finite, largest / np.float32(6), 0), _E4M3), 127)
    scale = np.where(is_finite, _E4M3[stored.clip(0, 126)], np.nan).astype(np.float32)
    scaled = np.where(is_finite & (scale != 0), groups / np.where(scale == 0, np.float32(1), scale), np.float32(0))
    codes, numbers = _e2m1(scaled)
    return Exact(codes, stored.astype(np.uint8), None, _product(numbers, scale, dtype), np.abs(scaled) >= 7)


def _of_rows(w: np.ndarray, options: Options, dtype: mx.Dtype | None, scales: np.ndarray | None) -> Exact:
    axes: Any = (-2, -1) if options.granularity == "tensor" else (-1,)
    largest, magnitudes = _LARGEST[options.mode], np.abs(w)
    if scales is None and options.mode == "ternary":
        scales = magnitudes.astype(np.float64).mean(axis=axes, keepdims=True).astype(np.float32)
    elif scales is None:
        scales = magnitudes.max(axis=axes, keepdims=True) / np.float32(largest)
    scale = np.where(np.isfinite(w).all(axis=axes, keepdims=True), scales, np.float32(np.nan))
    if options.mode == "fp8_e4m3":
        # Of a scale of 0 the codes keep the signs of w, as elsewhere.
        scaled = np.where(np.isfinite(scale), w / np.where(scale == 0, np.float32(np.inf), scale), np.float32(0))
        codes, numbers = _e4m3(scaled)
        # Halfway to what would be the next number, 480, the even code is that of 448.
        return Exact(codes, scale, None, _product(numbers, scale, dtype), np.abs(scaled) > 464)
    is_usable = np.isfinite(scale) & (scale != 0)
    steps = np.where(is_usable, np.rint(w / np.where(is_usable, scale, np.float32(1))), np.float32(0))
    # No negative zeros among the codes' numbers.
    numbers = np.clip(steps, -largest, largest) + np.float32(0)
    offset = 1 if options.mode == "ternary" else largest + 1
    return Exact(numbers + offset, scale, None, _product(numbers, scale, dtype), np.abs(steps) > largest)


def _e2m1(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and numbers; a negative number that rounds to 0 gets the code 0, as MLX's CPU code has it."""
    code = _nearest(x, _E2M1)
    is_negative = (x < 0) & (code > 0)
    return np.where(is_negative, code + 8, code), np.where(is_negative, -_E2M1[code], _E2M1[code])


def _e4m3(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and numbers; the sign is kept, also that of 0."""
    code = _nearest(x, _E4M3)
    is_negative = np.signbit(x)
    return np.where(is_negative, code + 128, code), np.where(is_negative, -_E4M3[code], _E4M3[code])
