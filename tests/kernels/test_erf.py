"""kernels/_common/erf.h on the emulator against float64, over the whole range."""

import math

import mlx.core as mx
import numpy as np
import pytest
from room_proofs import broken, resource
import torch

TINY = float(np.finfo(np.float32).tiny)
# Both signs of every magnitude, and many numbers around the points where one form takes over from another.
NUMBERS = np.unique(
    np.concatenate(
        [
            np.linspace(-11, 11, 8001),
            *(at + np.linspace(-1e-3, 1e-3, 101) for at in (-0.75, -0.5, 0.5, 0.75, 9.2)),
            *(sign * np.geomspace(1e-37, 1e37, 201) for sign in (1, -1)),
        ]
    ).astype(np.float32)
)


def both(x, kernel=None):
    """erf and erfc of float32 numbers."""
    inputs = mx.array(np.resize(np.float32(x), max(8, len(x))))
    found = (kernel or resource("erf_of_each"))(
        [inputs],
        output_shapes=[inputs.shape] * 2,
        output_dtypes=[mx.float32] * 2,
        grid=(inputs.size, 1, 1),
        threadgroup=(min(256, inputs.size), 1, 1),
        engine="emulator",
    )
    return [np.array(each)[: len(x)] for each in found]


def units(got, want):
    """Largest error in units of the last place of what is wanted; below normal numbers the smallest one is a unit."""
    size = np.abs(want)
    unit = np.where(size >= TINY, np.spacing(size.astype(np.float32)), TINY)
    return (np.abs(got.astype(np.float64) - want) / unit).max()


def errors(kernel=None):
    """Largest errors of erf and erfc."""
    exact = torch.tensor(NUMBERS.astype(np.float64))
    wanted = torch.special.erf(exact).numpy(), torch.special.erfc(exact).numpy()
    return [units(got, want) for got, want in zip(both(NUMBERS, kernel), wanted, strict=True)]


def test_errors_are_a_few_units_in_the_last_place():
    error, complement = errors()
    assert error <= 1.5
    assert complement <= 4


def test_limits_and_signs():
    error, complement = both([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-30])
    assert error[:4].tolist() == [0, 0, 1, -1]
    assert np.signbit(error[:2]).tolist() == [False, True]
    assert complement[:4].tolist() == [1, 1, 0, 2]
    assert np.isnan([error[4], complement[4]]).all()
    assert error[5:7].tolist() == [1, -1]
    assert complement[5:].tolist() == [0, 2, 1]
    assert error[7] == pytest.approx(2 / math.sqrt(math.pi) * 1e-30, rel=1e-6)


def test_erf_is_odd():
    x = np.abs(NUMBERS)
    assert np.array_equal(both(x)[0], -both(-x)[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-0.3761262f", "-0.3761260f"),
        ("0.129642859f", "0.129642f"),
        ("fma(-lost, e, e)", "fma(0.0f * lost, e, e)"),
        ("x < 0.0f ? 2.0f - tail : tail", "2.0f - tail"),
        ("size <= 0.75f", "size <= 0.95f"),
    ],
)
def test_broken_source_is_found(old, new):
    kernel = broken(resource("erf_of_each"), old, new)
    assert kernel.source != resource("erf_of_each").source, "the text to replace is not there"
    error, complement = errors(kernel)
    assert error > 1.5 or complement > 4
