"""quantize in NumPy: what the room's cases are judged by. It shares no formula with the room.

Scales and quotients are float32, as the formulas say, for another precision has other ties; the nearest number is
searched for, and values are float64.
"""

from dataclasses import dataclass
import math
from typing import Final

from forge_mlx.kernels.quantize.options import Options
import numpy as np

_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Eight subnormal numbers, then eight for each power of two from 2^-6 to 2^8, of which the last stands for NaN.
_E4M3: Final = np.array([m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0**e for e in range(-9, 6) for m in range(8)])[
    :-1
]


@dataclass(frozen=True)
class Exact:
    """What quantize makes of finite weights.

    Attributes:
        codes: `[..., K]`, one each.
        scales: As the op returns them: the scale or, in mxfp4, mxfp8 and nvfp4, the byte that stands for it.
        biases: As the op returns them; None but for affine.
        values: `[..., K]`, not rounded.
        is_clipped: `[..., K]`, where the nearest number of the same spacing has no code.
    """

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None
    values: np.ndarray
    is_clipped: np.ndarray


def quantize(w: np.ndarray, options: Options) -> Exact:
    """Codes, scales and values of weights.

    Args:
        w: `[..., K]`, finite, float32.
        options: The mode.
    """
    if w.size == 0:
        none, scales = np.zeros(w.shape), np.zeros(options.scales_shape(w.shape))
        return Exact(none, scales, scales if options.has_biases else None, none, none > 0)
    groups = w.reshape(*w.shape[:-1], -1, options.group_size or w.shape[-1])
    axes = (-3, -2, -1) if options.granularity == "tensor" else (-1,)
    bias, stored = None, None
    if options.mode == "affine":
        scale, bias = _affine(groups, 2**options.bits - 1)
        numbers, next_one = np.arange(2.0**options.bits), 2.0**options.bits
    else:
        numbers, next_one = _numbers(options)
        magnitudes = np.abs(groups)
        largest = magnitudes.max(axis=axes, keepdims=True)
        mean = magnitudes.mean(axis=axes, keepdims=True, dtype=np.float64).astype(np.float32)
        scale = mean if options.mode == "ternary" else largest / np.float32(numbers[-1])
        if options.mode in ("mxfp4", "mxfp8"):
            ratio = np.where(largest == 0, 1, largest.astype(np.float64) / numbers[-1])
            exponent = np.ceil(np.log2(ratio)).clip(-127, 127)
            scale, stored = (2.0**exponent).astype(np.float32), exponent + 127
        elif options.mode == "nvfp4":
            stored = _nearest(scale, _E4M3)
            scale = _E4M3[stored].astype(np.float32)
    offset = np.float32(0) if bias is None else bias
    x = (groups - offset) / np.where(scale == 0, np.float32(math.inf), scale)
    index = _nearest(x, numbers)
    sign = np.where(np.signbit(x), -1, 1)
    values = sign * numbers[index] * scale + offset.astype(np.float64)
    is_clipped = _nearest(x, np.append(numbers, next_one)) == len(numbers)
    return Exact(
        _codes(index, sign, options).reshape(w.shape),
        (scale if stored is None else stored)[..., 0],
        None if bias is None else bias[..., 0],
        values.reshape(w.shape),
        is_clipped.reshape(w.shape),
    )


def _affine(groups: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
    high, low = groups.max(axis=-1, keepdims=True), groups.min(axis=-1, keepdims=True)
    edge = np.where(np.abs(low) > np.abs(high), low, high)
    step = np.maximum((high - low) / np.float32(last), np.float32(1e-7)) * np.where(edge == high, -1, 1).astype(
        np.float32
    )
    count = np.rint(edge / step).astype(np.float32)
    scale = np.where(count == 0, step, edge / np.where(count == 0, 1, count)).astype(np.float32)
    return scale, np.where(count == 0, np.float32(0), edge)


def _numbers(options: Options) -> tuple[np.ndarray, float]:
    """What codes without a sign stand for, and what would come next."""
    if options.mode in ("mxfp4", "nvfp4"):
        return _E2M1, 8.0
    if options.mode in ("mxfp8", "fp8_e4m3"):
        return _E4M3, 480.0
    largest = {"int8": 127.0, "int4": 7.0, "ternary": 1.0}[options.mode]
    return np.arange(largest + 1), largest + 1


def _nearest(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The index of the number nearest to the magnitude of x, of two the even index."""
    magnitude = np.abs(x)
    above = np.searchsorted(numbers, magnitude).clip(1, len(numbers) - 1)
    middle = (numbers[above - 1] + numbers[above]) / 2
    is_above = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    found: np.ndarray = np.where(is_above, above, above - 1)
    return found


def _codes(index: np.ndarray, sign: np.ndarray, options: Options) -> np.ndarray:
    codes = index
    if options.mode in ("mxfp4", "nvfp4"):
        # A zero has one code.
        codes = index + 8 * ((sign < 0) & (index > 0))
    elif options.mode in ("mxfp8", "fp8_e4m3"):
        codes = index + 128 * (sign < 0)
    elif options.mode != "affine":
        codes = sign * index + {"int8": 128, "int4": 8, "ternary": 1}[options.mode]
    return codes
