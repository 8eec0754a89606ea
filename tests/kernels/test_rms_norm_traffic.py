"""What the kernels of rms_norm read and write, counted by the emulator."""

from functools import cache

from forge_mlx import kernels
from forge_mlx.metal import emulator
import mlx.core as mx
import pytest

# Rows, columns, dtype.
SIZES = [
    (48, 4096, mx.float32),
    (48, 8192, mx.bfloat16),
    (600, 1000, mx.float16),
    (2048, 128, mx.bfloat16),
    (2048, 8, mx.float32),
    pytest.param(4096, 4096, mx.float32, marks=pytest.mark.slow),
    pytest.param(4096, 8192, mx.bfloat16, marks=pytest.mark.slow),
]
LONG = [(6, 4100, mx.float32), pytest.param(6, 128256, mx.bfloat16, marks=pytest.mark.slow)]


@cache
def counts(rows, columns, dtype):
    """Kernel -> buffer -> its counts, of a forward and a backward pass."""
    x = mx.random.normal((rows, columns), key=mx.random.key(0)).astype(dtype)
    w = mx.ones((columns,), dtype)
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(mx.vjp(lambda x, w: kernels.rms_norm(x, w, impl="emulator"), [x, w], [x]))
    return {launch.name: Launch(launch) for launch in emulator.report().launches}


class Launch:
    def __init__(self, record):
        self.groups = record.counts.threadgroups
        self.buffers = {each.name: each for each in record.counts.buffers}

    def read(self, name):
        """Bytes read of a buffer, and by how many accesses."""
        return self.buffers[name].bytes_read, self.buffers[name].reads

    def written(self, name):
        return self.buffers[name].bytes_written, self.buffers[name].writes


@pytest.mark.parametrize(("rows", "columns", "dtype"), SIZES)
def test_rows_are_read_and_written_once_in_16_byte_accesses(rows, columns, dtype):
    launches = counts(rows, columns, dtype)
    once = (rows * columns * dtype.size, rows * columns * dtype.size // 16)
    forward, backward = launches["rms_norm_forward"], launches["rms_norm_backward"]
    assert forward.read("x") == forward.written("y") == once
    assert backward.read("x") == backward.read("dy") == backward.written("dx") == once
    # One number a row: at most one lane of each simdgroup reads it.
    of_rows = sum(backward.read(name)[0] for name in ("inverse_rms", "dr")) + forward.written("inverse_rms")[0]
    assert of_rows <= max(0.05 * once[0], 12 * rows)


@pytest.mark.parametrize(("rows", "columns", "dtype"), SIZES)
def test_w_and_the_parts_of_dw_move_once_a_threadgroup(rows, columns, dtype):
    launches = counts(rows, columns, dtype)
    forward, backward, summed = (launches[f"rms_norm_{name}"] for name in ("forward", "backward", "sum_dw"))
    for launch in (forward, backward):
        assert launch.read("w")[0] == launch.groups * columns * dtype.size
    assert backward.written("partial_dw")[0] == summed.read("partial_dw")[0] == backward.groups * columns * 4
    assert summed.written("dw")[0] == columns * dtype.size


@pytest.mark.parametrize(("rows", "columns", "dtype"), LONG)
def test_long_rows_are_read_twice_at_most(rows, columns, dtype):
    launches = counts(rows, columns, dtype)
    nbytes = rows * columns * dtype.size
    forward = launches["rms_norm_forward_long"]
    assert forward.read("x") == (2 * nbytes, 2 * nbytes // 16)
    assert forward.written("y") == (nbytes, nbytes // 16)
    first, second = launches["rms_norm_backward_long_rows"], launches["rms_norm_backward_long"]
    for launch in (first, second):
        assert launch.read("x") == launch.read("dy") == (nbytes, nbytes // 16)
    assert second.written("dx") == (nbytes, nbytes // 16)
    groups_below_each_other = second.written("partial_dw")[0] // (columns * 4)
    assert groups_below_each_other == -(-rows // 4)
