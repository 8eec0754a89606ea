"""What the kernels of cross_entropy read and write, counted by the emulator."""

from functools import cache

from forge_mlx.kernels.cross_entropy import cross_entropy
from forge_mlx.metal import emulator
import mlx.core as mx
import pytest


@cache
def counts(rows, columns, dtype, ignored=0):
    """Kernel -> buffer -> its counts, of a forward and a backward pass; the first `ignored` targets are."""
    logits = mx.random.normal((rows, columns), key=mx.random.key(0)).astype(dtype)
    targets = mx.where(mx.arange(rows) < ignored, -100, mx.arange(rows) % columns)
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(mx.grad(lambda logits: cross_entropy(logits, targets, impl="emulator"))(logits))
    forward, backward = emulator.report().launches
    return [{each.name: each for each in launch.counts.buffers} for launch in (forward, backward)]


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (48, 4096, mx.float32),
        (48, 8192, mx.bfloat16),
        (600, 1000, mx.float16),
        (2048, 8, mx.float32),
        (6, 4100, mx.float32),
        (2, 128256, mx.bfloat16),
        pytest.param(4096, 4096, mx.float32, marks=pytest.mark.slow),
        pytest.param(64, 128256, mx.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_logits_are_read_once_each_way_in_16_byte_accesses(rows, columns, dtype):
    forward, backward = counts(rows, columns, dtype)
    nbytes = rows * columns * dtype.size
    for each in (forward["logits"], backward["logits"]):
        assert (each.bytes_read, each.reads) == (nbytes, nbytes // 16)
    assert (backward["dlogits"].bytes_written, backward["dlogits"].writes) == (nbytes, nbytes // 16)
    # One number a row: at most one lane of each simdgroup reads it.
    assert (forward["loss"].bytes_written, forward["parts"].bytes_written) == (4 * rows, 8 * rows)
    assert forward["codes"].bytes_read <= max(0.05 * nbytes, 4 * rows)
    of_rows = sum(backward[name].bytes_read for name in ("codes", "parts", "dloss", "dparts"))
    assert of_rows <= max(0.05 * 2 * nbytes, 20 * rows)


def test_ignored_rows_are_not_read():
    forward, backward = counts(48, 1000, mx.float32, 20)
    for each in (forward["logits"], backward["logits"]):
        assert each.bytes_read == 28 * 1000 * 4
    assert backward["dlogits"].bytes_written == 48 * 1000 * 4
