"""The numbers that codes stand for, in units of the scale: whole numbers, e2m1 and e4m3."""

import math
from typing import Final

from forge_mlx.kernels.quantize.options import Options
import mlx.core as mx

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Steps of 2^-9 below 2^-6, then eight steps to each power of two; the last code is NaN.
E4M3: Final = (
    *(step * 2.0**-9 for step in range(8)),
    *((8 + step) * 2.0**exponent for exponent in range(-9, 5) for step in range(8)),
    *(step * 32.0 for step in range(8, 15)),
    math.nan,
)

# Added to a code's number in modes whose numbers are signed integers.
_OFFSETS: Final = {"int8": 128, "int4": 8, "ternary": 1}
# The largest of those integers; the smallest is its negative.
_LARGEST: Final = {"int8": 127, "int4": 7, "ternary": 1}


def zero_code(options: Options) -> int:
    """The code of 0.

    Args:
        options: The mode.
    """
    return _OFFSETS.get(options.mode, 0)


def rounded(x: mx.array, options: Options) -> mx.array:
    """The nearest number that has a code, halves to even.

    Args:
        x: Weights in units of their scales, float32.
        options: The mode.

    Returns:
        float32. A zero is +0, but for e4m3, which keeps its sign.
    """
    if options.mode == "affine":
        # Nothing is below 0: the edge that the steps are counted from is the group's own.
        return mx.minimum(mx.round(x), 2**options.bits - 1)
    if options.mode in _LARGEST:
        # 0 is added to make +0 of -0.
        return mx.round(mx.clip(x, -_LARGEST[options.mode], _LARGEST[options.mode])) + 0.0
    if options.mode in ("mxfp8", "fp8_e4m3"):
        return to_e4m3(x)
    return _float_rounded(mx.clip(x, -E2M1[-1], E2M1[-1]) if options.mode == "nvfp4" else x, 1, 0)


def to_e4m3(x: mx.array) -> mx.array:
    """The nearest number of e4m3, 448 at most, halves to even; a zero keeps the sign of x.

    `mx.to_fp8` is not used, as it and `mx.from_fp8` have no vmap.

    Args:
        x: float32.
    """
    sign = mx.view(x, mx.uint32) & 0x80000000
    nearest = mx.view(_float_rounded(mx.clip(x, -448, 448), 3, -6), mx.uint32)
    return mx.view(nearest | sign, mx.float32)


def _float_rounded(x: mx.array, mantissa: int, least: int) -> mx.array:
    """Rounded to some bits behind the leading one, below 2^least to the places of 2^least; a zero is +0.

    Adding a number whose last place is the wanted one rounds there, and taking it away again is exact. It is 1.5 * 2^23
    of those places, so that a negative x leaves its exponent alone.
    """
    power = mx.maximum(mx.view(x, mx.int32) & 0x7F800000, (127 + least) << 23)
    large = mx.view(power + (((23 - mantissa) << 23) + 0x400000), mx.float32)
    return (x + large) - large


def codes_of(numbers: mx.array, options: Options) -> mx.array:
    """The codes of numbers.

    Args:
        numbers: As `rounded` returns them; not NaN.
        options: The mode.

    Returns:
        uint8 of the same shape.
    """
    if options.mode in ("mxfp8", "fp8_e4m3"):
        return e4m3_codes(numbers)
    if options.mode in ("mxfp4", "nvfp4"):
        # Twice the number is whole: 0, 1, 2, 3, 4, 6, 8 or 12.
        places = mx.array([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], mx.uint8)
        return places[mx.abs(2 * numbers).astype(mx.uint32)] | (numbers < 0).astype(mx.uint8) << 3
    return (numbers + zero_code(options)).astype(mx.uint8)


def numbers_of(codes: mx.array, options: Options) -> mx.array:
    """The numbers of codes.

    Args:
        codes: uint8.
        options: The mode.

    Returns:
        float32 of the same shape.
    """
    if options.mode in ("mxfp8", "fp8_e4m3"):
        return e4m3_numbers(codes)
    if options.mode in ("mxfp4", "nvfp4"):
        return mx.array(E2M1 + tuple(-each for each in E2M1))[codes]
    return codes.astype(mx.float32) - zero_code(options)


def e4m3_codes(numbers: mx.array) -> mx.array:
    """The codes of numbers that e4m3 has.

    Args:
        numbers: float32.

    Returns:
        uint8.
    """
    bits = mx.view(numbers, mx.uint32)
    size, sign = bits & 0x7FFFFFFF, bits >> 31 << 7
    places = mx.where(size < 121 << 23, mx.abs(numbers) * 512, (size >> 20) - (120 << 3))
    return (places.astype(mx.uint32) | sign).astype(mx.uint8)


def e4m3_numbers(codes: mx.array) -> mx.array:
    """The numbers of codes; NaN for 0x7F and 0xFF.

    Args:
        codes: uint8.

    Returns:
        float32.
    """
    return mx.array(E4M3 + tuple(-each for each in E4M3))[codes]


def is_clipped(x: mx.array, options: Options) -> mx.array | None:
    """Where the nearest number of the codes' grid, if that went on without an end, has no code.

    Args:
        x: Weights in units of their scales, float32.
        options: The mode.

    Returns:
        Booleans of the shape of x; None if that cannot happen in this mode.
    """
    size, clipped = mx.abs(x), None
    # A half goes to the even one: 2^bits, 128, 8 and 2 are, and so is 8 behind 6, but not 480 behind 448.
    if options.mode == "affine":
        clipped = x >= 2**options.bits - 0.5
    elif options.mode in _LARGEST:
        clipped = size >= _LARGEST[options.mode] + 0.5
    elif options.mode == "nvfp4":
        clipped = size >= 7
    elif options.mode == "fp8_e4m3":
        clipped = size > 464
    return clipped
