"""kernels/_common/reduce.h on the emulator, with every check and several orders of threads."""

import warnings

from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import resource


def launch(name, inputs, shape, threads):
    with emulator.settings(schedules=3):
        (out,) = resource(name)(
            inputs,
            output_shapes=[shape],
            output_dtypes=[mx.float32],
            grid=(threads, 1, 1),
            threadgroup=(threads, 1, 1),
            engine="emulator",
        )
        return np.array(out)


@pytest.mark.parametrize("threads", [1, 31, 32, 33, 40, 64, 65, 256, 1000, 1024])
def test_every_thread_of_a_threadgroup_gets_the_same_sums_and_maxima(threads):
    rounds = 3
    values = np.random.default_rng(0).normal(size=(rounds, threads, 2)).astype(np.float32) - 3
    with warnings.catch_warnings():
        # Where the last simdgroup is not full. Metal allows that, and so does the helper.
        warnings.filterwarnings("ignore", category=emulator.MetalWarning)
        out = launch("reduce_threadgroup", [mx.array(values), rounds], (rounds, threads, 4), threads)
    assert (out == out[:, :1]).all()
    np.testing.assert_allclose(out[:, 0, :2], values.astype(np.float64).sum(1), rtol=1e-5)
    np.testing.assert_array_equal(out[:, 0, 2:], values.max(1))


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
def test_lanes_of_a_part_get_the_same_result(lanes):
    values = np.random.default_rng(1).integers(-9, 0, 32).astype(np.float32)
    out = launch("reduce_lanes", [mx.array(values), lanes], (32, 3), 32)
    parts = values.reshape(-1, lanes)
    want = np.stack([parts.sum(1), parts.max(1), parts[:, 0]], axis=1)
    np.testing.assert_array_equal(out, np.repeat(want, lanes, axis=0))
