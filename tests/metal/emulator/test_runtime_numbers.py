"""Arithmetic of 16-bit floats that the runtime does in place of the processor, against exact fractions."""

from dataclasses import dataclass
from fractions import Fraction
import math

import numpy as np
import pytest
from runtime_launch import ALL, result, start


@dataclass(frozen=True)
class Format:
    """A 16-bit float: bits behind the point, and the largest exponent."""

    name: str
    mantissa: int
    top: int

    def value(self, bits: int) -> Fraction | float:
        """The number that bits stand for; a float where it is none or infinite."""
        sign = -1 if bits >> 15 else 1
        exponent, digits = bits >> self.mantissa & (2 * self.top + 1), bits & ((1 << self.mantissa) - 1)
        if exponent == 2 * self.top + 1:
            return math.nan if digits else sign * math.inf
        whole = digits + (1 << self.mantissa if exponent else 0)
        return sign * whole * Fraction(2) ** (max(exponent, 1) - self.top - self.mantissa)

    def rounded(self, value: Fraction) -> int:
        """The bits of the nearest number, of the even one in the middle; zero is positive."""
        sign, size = (0x8000, -value) if value < 0 else (0, value)
        if not size:
            return 0
        exponent = max(math.floor(math.log2(size)) if size > Fraction(1, 2**1000) else -1000, 1 - self.top)
        while Fraction(2) ** (exponent + 1) <= size:
            exponent += 1
        while exponent > 1 - self.top and Fraction(2) ** exponent > size:
            exponent -= 1
        # round() of a fraction goes to even; a carry runs on into the exponent.
        steps = round(size / Fraction(2) ** (exponent - self.mantissa))
        bits = ((exponent + self.top - 1) << self.mantissa) + steps
        return sign | min(bits, (2 * self.top + 1) << self.mantissa)


HALF, BFLOAT = Format("half", 10, 15), Format("bfloat", 7, 127)
FORMATS = pytest.mark.parametrize("form", [HALF, BFLOAT], ids=lambda form: form.name)


def fma(form: Format, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The runtime's a*b+c."""
    body = f"uint i = thread_position_in_grid.x;\nout[i] = emu_fma_{form.name}(a[i], b[i], c[i]);"
    outputs = {"out": np.zeros(a.size, np.uint16)}
    outcome = start(body, {"a": a, "b": b, "c": c}, outputs, grid=a.size, threadgroup=256, checks=ALL - {"language"})
    return result(outcome, 0, np.uint16)


def expected(form: Format, a: int, b: int, c: int) -> int | None:
    """The correctly rounded a*b+c; None for what is not a number."""
    x, y, z = form.value(a), form.value(b), form.value(c)
    infinity = (2 * form.top + 1) << form.mantissa
    sign = (a ^ b) & 0x8000
    if any(isinstance(each, float) for each in (x, y, z)):
        product = float(x) * float(y) if isinstance(x, float) or isinstance(y, float) else 0.0
        total = product + (z if isinstance(z, float) else 0.0)
        return None if math.isnan(total) else infinity | (0x8000 if total < 0 else 0)
    assert isinstance(x, Fraction | int)
    total = Fraction(x * y + z)
    if total:
        return form.rounded(total)
    # A sum of zeros is negative where both are; a difference of equal numbers is +0.
    return 0x8000 if x * y == 0 and z == 0 and sign and c >> 15 else 0


@FORMATS
def test_fma_is_rounded_once(form: Format):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 16, (3, 4096)).astype(np.uint16)
    # Half of them with exponents near each other, where the rounding is delicate.
    middle = rng.integers(0, 1 << form.mantissa, (3, 2048)) | (
        (form.top + rng.integers(-9, 9, (3, 2048))) << form.mantissa
    )
    bits[:, 2048:] = (middle | rng.integers(0, 2, (3, 2048)) << 15).astype(np.uint16)
    got = fma(form, *bits)
    for a, b, c, bits_out in zip(*bits.tolist(), got.tolist(), strict=True):
        want = expected(form, a, b, c)
        if want is None:
            assert math.isnan(form.value(bits_out)), (a, b, c)
        else:
            assert bits_out == want, (hex(a), hex(b), hex(c), hex(bits_out), hex(want))


@FORMATS
def test_fma_at_ties_that_a_tiny_term_decides(form: Format):
    # 1 + half a unit in the last place is a tie: the term far below breaks it, in either direction.
    one, unit = form.top << form.mantissa, form.mantissa
    half_unit = form.rounded(Fraction(1, 2 ** (unit + 1)))
    tiny = 1
    rows = [
        # (1 + ulp/2 as a product is not exact in 16 bits, so the term comes through c.)
        (form.rounded(Fraction(2) ** -(unit + 1)), one, one),
        (form.rounded(Fraction(2**unit + 1, 2**unit)), form.rounded(Fraction(2) ** -(unit + 1)), one),
        (tiny, one, half_unit),
        (tiny | 0x8000, one, half_unit),
        (tiny, tiny, one),
        (tiny | 0x8000, tiny, one),
        (form.rounded(Fraction(3, 2)), half_unit, tiny),
    ]
    a, b, c = (np.array(column, np.uint16) for column in zip(*rows, strict=True))
    a, b, c = (np.resize(column, 8) for column in (a, b, c))
    got = fma(form, a, b, c)
    assert got.tolist() == [expected(form, *each) for each in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]


@FORMATS
def test_fma_needs_a_single_rounding(form: Format):
    # Rounding the product first gives another result for some of these: the test would not see a missing fma otherwise.
    rng = np.random.default_rng(2)
    bits = (rng.integers(0, 1 << form.mantissa, (3, 512)) | (form.top << form.mantissa)).astype(np.uint16)
    bits[2] |= 0x8000
    twice = []
    for a, b, c in zip(*bits.tolist(), strict=True):
        product = form.value(form.rounded(Fraction(form.value(a) * form.value(b))))
        twice.append(form.rounded(Fraction(product + form.value(c))))
    got = fma(form, *bits)
    once = [expected(form, *each) for each in zip(*bits.tolist(), strict=True)]
    assert got.tolist() == once
    assert twice != once


def test_float_to_bfloat_rounds_to_nearest_even():
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    # Ties, their neighbours, the largest numbers, denormals.
    high = rng.integers(0, 1 << 16, 512, dtype=np.uint32) << 16
    bits[:1536] = np.concatenate([high | 0x8000, high | 0x7FFF, high | 0x8001])
    bits[1536:1544] = [0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 1, 0x7FFF, 0x8000, 0x18000, 0x80000001]
    x = bits.view(np.float32)
    body = "uint i = thread_position_in_grid.x;\nout[i] = as_type<ushort>(bfloat(x[i]));"
    outcome = start(body, {"x": x}, {"out": np.zeros(x.size, np.uint16)}, grid=x.size, threadgroup=256)
    for value, got in zip(x.tolist(), result(outcome, 0, np.uint16).tolist(), strict=True):
        if math.isnan(value):
            assert math.isnan(BFLOAT.value(got))
        elif math.isinf(value):
            assert BFLOAT.value(got) == value
        else:
            sign = 0x8000 if math.copysign(1, value) < 0 else 0
            assert got == BFLOAT.rounded(abs(Fraction(value))) | sign, value
