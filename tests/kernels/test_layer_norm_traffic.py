"""What the kernels of layer_norm read and write, counted by the emulator."""

from functools import cache

from forge_mlx.kernels.norms.cases import LayerNormCase
import mlx.core as mx
from norm_proofs import counted
import pytest

counts = cache(counted)
F16, BF16 = mx.float16, mx.bfloat16
CASES = [
    LayerNormCase((48, 4096)),
    LayerNormCase((48, 8192), BF16, BF16, b_dtype=BF16),
    LayerNormCase((2048, 128), F16, F16, b_dtype=F16),
    LayerNormCase((2048, 8)),
    pytest.param(LayerNormCase((4096, 4096)), marks=pytest.mark.slow),
    pytest.param(LayerNormCase((4096, 8192), BF16, BF16, b_dtype=BF16), marks=pytest.mark.slow),
]


def named(case):
    return case.name


@pytest.mark.parametrize("case", CASES, ids=named)
def test_rows_are_read_and_written_once_in_16_byte_accesses(case):
    (rows, columns), size = case.shape, case.dtype.size
    once = (rows * columns * size, rows * columns * size // 16)
    forward, backward = counts(case)["layer_norm_forward"], counts(case)["layer_norm_backward"]
    assert forward.read("x") == forward.written("y") == once
    assert backward.read("x") == backward.read("dy") == backward.written("dx") == once
    # Numbers that a row has once: at most one lane of each simdgroup reads each of them.
    of_rows = sum(backward.read(name)[0] for name in ("mean", "inverse_std", "dmean", "ds"))
    of_rows += sum(forward.written(name)[0] for name in ("mean", "inverse_std"))
    assert of_rows <= max(0.05 * once[0], 24 * rows)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_weights_and_the_parts_of_their_gradients_move_once_a_threadgroup(case):
    columns, launches = case.shape[-1], counts(case)
    forward, backward, summed = (launches[name] for name in ("layer_norm_forward", "layer_norm_backward", "sum_parts"))
    once = columns * case.dtype.size
    assert forward.read("w")[0] == forward.read("b")[0] == forward.groups * once
    assert backward.read("w")[0] == backward.groups * once
    assert backward.written("parts")[0] == summed.read("parts")[0] == backward.groups * 2 * columns * 4
    assert summed.written("total")[0] == 2 * once


@pytest.mark.parametrize(
    "case",
    [
        LayerNormCase((6, 4100)),
        pytest.param(LayerNormCase((6, 128256), BF16, BF16, b_dtype=BF16), marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_long_rows_are_read_twice_at_most(case):
    (rows, columns), launches = case.shape, counts(case)
    nbytes = rows * columns * case.dtype.size
    once = (nbytes, nbytes // 16)
    forward = launches["layer_norm_forward_long"]
    assert forward.read("x") == (2 * nbytes, 2 * nbytes // 16)
    assert forward.written("y") == once
    first, second = launches["layer_norm_backward_long_rows"], launches["layer_norm_backward_long"]
    for launch in (first, second):
        assert launch.read("x") == launch.read("dy") == once
    assert second.written("dx") == once
    assert second.written("parts")[0] == -(-rows // 4) * 2 * columns * 4
