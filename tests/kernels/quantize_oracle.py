"""Every mode of quantize in NumPy, written from the formulas alone; it shares nothing with the room.

Nearest codes are searched for in float64; the rest is exactly rounded float32, as the formulas say.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

MX_LARGEST = {"mxfp4": 6.0, "mxfp8": 448.0}
INTEGER_LARGEST = {"int8": 127, "int4": 7, "ternary": 1}
# Codes from 0 up and what they stand for; the sign is a bit above. e4m3 has no infinity, and its last code is NaN.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [2.0**-9 * m for m in range(8)] + [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8)]
)
E4M3 = E4M3[:-1]


@dataclass(frozen=True)
class Quantized:
    """What quantize of one weight gives.

    Attributes:
        codes: `[..., K]`, one each, not packed.
        scales: As the op returns them: float32, or uint8 in the modes mxfp4, mxfp8 and nvfp4.
        biases: float32, or None.
        values: `[..., K]` in float32, as the weight's dtype has rounded them.
        clipped: `[..., K]`, whether the nearest number of the same spacing lies outside of the codes.
    """

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None
    values: np.ndarray
    clipped: np.ndarray


def round_to(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """float32 rounded to a dtype, halves to even, and widened again."""
    x = np.asarray(x, np.float32)
    if dtype == mx.float32:
        return x
    with np.errstate(over="ignore"):
        if dtype == mx.float16:
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code of the number in an ascending table that is nearest to |x|; of two, the even code."""
    magnitude = np.abs(np.asarray(x, np.float64))
    above = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    below = above - 1
    up, down = table[above] - magnitude, magnitude - table[below]
    return np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """`[..., K]` -> `[..., K * bits / 32]` in uint32: code after code, each and all from the lowest bit up."""
    stream = (codes[..., None].astype(np.uint32) >> np.arange(bits, dtype=np.uint32)) & 1
    words = stream.reshape(*codes.shape[:-1], -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return words.sum(axis=-1).astype(np.uint32)


def quantize(
    w: np.ndarray,
    dtype: mx.Dtype,
    mode: str,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    granularity: str | None = None,
    scales: np.ndarray | None = None,
) -> Quantized:
    """Codes, scales, values of a weight.

    Args:
        w: `[..., K]` in float32, numbers of the dtype.
        dtype: The weight's.
        mode: As the op takes it, with its options; None for their defaults.
        bits: Of affine.
        group_size: Of affine.
        granularity: Of ternary and fp8_e4m3.
        scales: Instead of the ternary mean, which has no defined order.
    """
    w = np.asarray(w, np.float32)
    with np.errstate(all="ignore"):
        if mode == "affine":
            return _affine(w, dtype, bits or 4, group_size or 64)
        if mode in MX_LARGEST:
            return _mx(w, dtype, mode)
        if mode == "nvfp4":
            return _nvfp4(w, dtype)
        axes = (-2, -1) if (granularity or {"ternary": "tensor"}.get(mode, "row")) == "tensor" else (-1,)
        s = _row_scale(w, mode, axes) if scales is None else scales
        return _fp8(w, dtype, s) if mode == "fp8_e4m3" else _integers(w, dtype, s, INTEGER_LARGEST[mode])


def _row_scale(w: np.ndarray, mode: str, axes: tuple[int, ...]) -> np.ndarray:
    magnitudes = np.abs(w)
    if mode == "ternary":
        s = magnitudes.astype(np.float64).mean(axis=axes, keepdims=True).astype(np.float32)
    else:
        s = magnitudes.max(axis=axes, keepdims=True) / np.float32(INTEGER_LARGEST.get(mode, 448))
    return np.where(np.isfinite(w).all(axis=axes, keepdims=True), s, np.float32(np.nan))


def _affine(w: np.ndarray, dtype: mx.Dtype, bits: int, group_size: int) -> Quantized:
    groups = w.reshape(*w.shape[:-1], -1, group_size)
    last = np.float32(2**bits - 1)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    is_low = np.abs(low) > np.abs(high)
    step = np.maximum((high - low) / last, np.float32(1e-7))
    step = np.where(is_low, step, -step)
    edge = np.where(is_low, low, high)
    count = np.rint(edge / step)
    scale = np.where(count != 0, edge / np.where(count == 0, np.float32(1), count), step)
    bias = np.where(count != 0, edge, np.float32(0))
    steps = np.rint((groups - bias) / scale)
    finite = np.isfinite(groups).all(axis=-1, keepdims=True)
    codes = np.where(finite, np.clip(steps, 0, last), 0)
    scale, bias = (round_to(np.where(finite, each, np.float32(np.nan)), dtype) for each in (scale, bias))
    values = round_to(round_to(codes.astype(np.float32) * scale, dtype) + bias, dtype)
    return Quantized(
        codes.astype(np.uint32).reshape(w.shape),
        scale[..., 0],
        bias[..., 0],
        values.reshape(w.shape),
        ((steps < 0) | (steps > last)).reshape(w.shape),
    )


def _mx(w: np.ndarray, dtype: mx.Dtype, mode: str) -> Quantized:
    groups = w.reshape(*w.shape[:-1], -1, 32)
    largest, absmax = MX_LARGEST[mode], np.abs(groups).max(axis=-1, keepdims=True)
    finite = np.isfinite(absmax)
    # The smallest power of two with largest * 2^e >= absmax, of what e8m0 has; 1 for zeros.
    exponents = np.searchsorted(largest * 2.0 ** np.arange(-127, 128), absmax.astype(np.float64)) - 127
    exponent = np.where(absmax == 0, 0, exponents)
    s = np.where(finite, 2.0 ** np.where(finite, exponent, 0), np.nan)
    scaled = np.where(finite, groups / s, 0)
    codes, values = (_e2m1 if mode == "mxfp4" else _e4m3)(scaled)
    values = round_to((values * s).astype(np.float32), dtype)
    scales = np.where(finite, exponent + 127, 255).astype(np.uint8)[..., 0]
    return Quantized(codes.reshape(w.shape), scales, None, values.reshape(w.shape), np.zeros(w.shape, bool))


def _nvfp4(w: np.ndarray, dtype: mx.Dtype) -> Quantized:
    groups = w.reshape(*w.shape[:-1], -1, 16)
    absmax = np.abs(groups).max(axis=-1, keepdims=True)
    finite = np.isfinite(absmax)
    scales = np.where(finite, nearest(np.where(finite, absmax / np.float32(6), 0), E4M3), 127)
    s = np.where(finite, E4M3[scales.clip(0, 126)], np.nan).astype(np.float32)
    scaled = np.where(finite & (s != 0), groups / np.where(s == 0, np.float32(1), s), np.float32(0))
    codes, values = _e2m1(scaled)
    values = round_to(values.astype(np.float32) * s, dtype)
    clipped = np.abs(scaled) >= 7
    return Quantized(
        codes.reshape(w.shape),
        scales.astype(np.uint8)[..., 0],
        None,
        values.reshape(w.shape),
        clipped.reshape(w.shape),
    )


def _e2m1(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and numbers; a negative number that rounds to 0 gets the code 0, as MLX's CPU code has it."""
    code = nearest(x, E2M1)
    negative = (x < 0) & (code > 0)
    return np.where(negative, code + 8, code).astype(np.uint32), np.where(negative, -E2M1[code], E2M1[code])


def _e4m3(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and numbers; the sign is kept, also that of 0."""
    code = nearest(x, E4M3)
    negative = np.signbit(x)
    return np.where(negative, code + 128, code).astype(np.uint32), np.where(negative, -E4M3[code], E4M3[code])


def _integers(w: np.ndarray, dtype: mx.Dtype, s: np.ndarray, largest: int) -> Quantized:
    usable = np.isfinite(s) & (s != 0)
    steps = np.where(usable, np.rint(w / np.where(usable, s, np.float32(1))), np.float32(0))
    q = np.clip(steps, -largest, largest)
    offset = 1 if largest == 1 else largest + 1
    values = round_to((q + np.float32(0)) * s, dtype)
    return Quantized((q + offset).astype(np.uint32), s, None, values, np.abs(steps) > largest)


def _fp8(w: np.ndarray, dtype: mx.Dtype, s: np.ndarray) -> Quantized:
    # Of a scale of 0 the codes keep the signs of w, as elsewhere.
    scaled = np.where(np.isfinite(s), w / np.where(s == 0, np.float32(np.inf), s), np.float32(0))
    codes, values = _e4m3(scaled)
    # Halfway to what would be the next number, 480, the even code is that of 448.
    return Quantized(codes, s, None, round_to(values.astype(np.float32) * s, dtype), np.abs(scaled) > 464)
