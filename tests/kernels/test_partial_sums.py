"""The sum of what threadgroups left: against NumPy, in a fixed order, and with a broken source."""

from forge_mlx.kernels._common import partial_sums
from forge_mlx.kernels._common.partial_sums import sum_parts
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import broken

SHAPES = [(1, 1, 1), (2, 1, 5), (1, 3, 127), (3, 8, 128), (1, 9, 129), (2, 67, 300), (1, 1031, 4)]


def parts_of(shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def off(shape, dtype=mx.float32):
    """How far the sum is from NumPy's in float64, in units of what the dtype allows."""
    parts = parts_of(shape)
    with emulator.settings(schedules=3):
        total = sum_parts("emulator", mx.array(parts), dtype)
    assert total.dtype == dtype
    exact = parts.astype(np.float64).sum(axis=1)
    rounding = {mx.float32: 2.0**-22, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
    limit = rounding * np.abs(parts).sum(axis=1).max()
    return np.abs(np.array(total.astype(mx.float32), np.float64) - exact).max() / limit


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sum_is_that_of_numpy(shape):
    assert off(shape) <= 1


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_sum_is_rounded_once(dtype):
    assert off((2, 67, 300), dtype) <= 1


def test_order_of_the_sum_follows_from_the_shape():
    parts = mx.array(parts_of((2, 67, 300)))
    first = sum_parts("emulator", parts, mx.float32)
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            assert mx.array_equal(sum_parts("emulator", parts, mx.float32), first)


BREAKS = {
    "no barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", emulator.RaceError),
    "a part is left out": (
        "part = simdgroup_index_in_threadgroup;",
        "part = simdgroup_index_in_threadgroup + 1;",
        None,
    ),
    "a simdgroup is left out": ("simdgroup < simdgroups", "simdgroup < simdgroups - 1", None),
    "columns past the end": ("clamp(columns - first - own, 0, N)", "N", emulator.BoundsError),
    "every batch is the first": ("parts += size_t(threadgroup_position_in_grid.y)", "parts += size_t(0)", None),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_broken_source_is_found(fault, monkeypatch):
    old, new, error = BREAKS[fault]
    whole = partial_sums._kernel()
    changed = broken(whole, old, new)
    assert changed.source != whole.source, "the text to replace is not there"
    monkeypatch.setattr(partial_sums, "_kernel", lambda: changed)
    if error is None:
        assert off((2, 67, 299)) > 1
    else:
        with pytest.raises(error):
            off((2, 67, 299))
